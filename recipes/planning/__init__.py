"""Parts of `pipeback plan` that need no model: what is asked, tables, pictures, page, fitting and calibration."""
