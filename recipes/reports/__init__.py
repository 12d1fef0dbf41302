"""What the report is made of: runs read and gathered, numbers, tables, pictures."""
