// Streams and memory of the simulated accelerator.
//
//   memory    a tensor's address is reserved and cannot be read: the host faults on it. The bytes lie at another one,
//             where the operators of the CPU reach them. New and freed memory is NaN.
//   streams   queues of operators. Whoever has to wait (synchronize, item, a copy to memory that is not pinned) carries
//             out what it waits for, and no more; the policy says what is carried out besides.
//   pinned    memory of the host that copies read and write when they are carried out, not when they are called.
//
// Whoever carries out work holds `lock` and never needs Python's.

#pragma once

#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace {

using Run = std::function<void()>;
using Guard = std::lock_guard<std::recursive_mutex>;

constexpr auto SIM = c10::DeviceType::PrivateUse1;
constexpr int DEVICES = 2;
constexpr size_t ROOM = size_t(16) << 30;  // addresses of a device; memory is taken as it is touched
enum Policy { AT_ONCE, LATE, SIDE_FIRST, RANDOM, SIDE_LAST };

// ---- streams: queues, and moments in them ---------------------------------------------------------------------------

struct Queue;
struct Moment {  // when so many operators of a queue are done
  Queue* queue = nullptr;
  uint64_t number = 0;
};
struct Work {
  Run run;
  Moment after;  // of another queue
};
struct Queue {
  std::deque<Work> work;
  uint64_t done = 0, given = 0;
  bool side = true;
};
struct Place {
  char *seen = nullptr, *real = nullptr;  // the addresses of tensors, and where their bytes are
  size_t used = 0;
  std::multimap<size_t, char*> free;
  std::deque<Queue> queues;  // by the number of the stream: 0 the default one, 1 gives memory back
  at::Generator generator;
};
struct Block {
  int device;
  char* seen;
  size_t size;
  Queue* owner;
  std::set<Queue*> users;  // of record_stream
};
struct World {
  std::recursive_mutex lock;
  Place places[DEVICES];
  std::map<const void*, Block*> blocks;
  std::map<const char*, std::pair<size_t, std::shared_ptr<void>>> pinned;
  int policy = LATE;
  std::mt19937 dice;
};
World& world() {
  static World* one = new World;  // outlives every tensor
  return *one;
}
thread_local int current_device = 0;
thread_local int64_t current_stream[DEVICES] = {0, 0};

Queue& queue_of(int device, int64_t stream) { return world().places[device].queues.at(stream); }
Queue& current(int device) { return queue_of(device, current_stream[device]); }
Moment now(Queue& queue) { return {&queue, queue.given}; }
bool past(const Moment& moment) { return !moment.queue || moment.queue->done >= moment.number; }

struct Plain {  // operators of the CPU, without autograd, modes or autocast of whoever carries them out
  c10::impl::ForceDispatchKeyGuard keys{
      c10::DispatchKeySet(c10::DispatchKey::BackendSelect),
      c10::default_excluded_set | c10::autograd_dispatch_keyset_with_ADInplaceOrView};
  c10::AutoGradMode grad{false};
};

void wait(const Moment& moment);

bool step(Queue& queue, bool pull) {  // the next one, if nothing is in the way
  if (queue.work.empty()) return false;
  Moment after = queue.work.front().after;
  if (!past(after)) {
    if (pull) wait(after);
    return pull;
  }
  Run run = std::move(queue.work.front().run);
  queue.work.pop_front();
  queue.done++;
  Plain plain;
  if (run) run();
  return true;
}

void besides() {  // what the policy has done before anything else
  auto& w = world();
  for (bool more = true; more;) {
    more = false;
    for (auto& place : w.places)
      for (size_t n = 1; n < (w.policy == SIDE_FIRST ? place.queues.size() : 2); n++)
        while (step(place.queues[n], false)) more = true;
  }
  if (w.policy == RANDOM)
    for (int k = w.dice() % 4; k > 0; k--) {
      auto& queues = w.places[w.dice() % DEVICES].queues;
      step(queues[w.dice() % queues.size()], false);
    }
}

void wait(const Moment& moment) {
  Guard guard(world().lock);
  while (!past(moment)) {
    besides();
    if (!past(moment)) step(*moment.queue, true);
  }
}

void enqueue(Queue& queue, Run run, Moment after = {}) {
  auto& w = world();
  Guard guard(w.lock);
  queue.work.push_back({std::move(run), after});
  queue.given++;
  if (w.policy == AT_ONCE || (w.policy == SIDE_LAST && !queue.side)) wait(now(queue));
  besides();
}

// ---- memory ---------------------------------------------------------------------------------------------------------

char* real(const void* seen) {
  for (auto& place : world().places)
    if (seen >= place.seen && seen < place.seen + ROOM) return place.real + ((const char*)seen - place.seen);
  TORCH_CHECK(false, "sim: an address of no device");
}

void give_back(void* context) {
  auto* block = (Block*)context;
  auto& w = world();
  Guard guard(w.lock);
  w.blocks.erase(block->seen);
  auto& place = w.places[block->device];
  auto erase = [block, &place] {
    memset(place.real + (block->seen - place.seen), 0xFF, block->size);
    place.free.emplace(block->size, block->seen);
    delete block;
  };
  if (block->users.empty()) return enqueue(*block->owner, erase);  // later work of its stream may have it
  for (auto* user : block->users) enqueue(place.queues[1], {}, now(*user));
  enqueue(place.queues[1], {}, now(*block->owner));
  enqueue(place.queues[1], erase);
}

struct DeviceMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    auto& w = world();
    Guard guard(w.lock);
    c10::Device device(SIM, current_device);
    if (!size) return {nullptr, nullptr, &give_back, device};
    size = (size + 63) / 64 * 64;
    auto& place = w.places[current_device];
    auto found = place.free.upper_bound(size);  // the last of this size that came back, as it is noticed soonest
    char* seen = place.seen + place.used;
    if (found != place.free.begin() && (--found)->first == size) {
      seen = found->second;
      place.free.erase(found);
    } else {
      TORCH_CHECK(place.used + size <= ROOM, "sim: out of memory");
      place.used += size;
      memset(real(seen), 0xFF, size);
    }
    auto* block = new Block{current_device, seen, size, &current(current_device), {}};
    w.blocks[seen] = block;
    return {seen, block, &give_back, device};
  }
  void copy_data(void*, const void*, size_t) const override { TORCH_CHECK(false, "sim: not copied so"); }
} device_memory;

struct PinnedMemory final : c10::Allocator {
  static void unpin(void* start) {
    Guard guard(world().lock);
    world().pinned.erase((char*)start);
  }
  c10::DataPtr allocate(size_t size) override {
    std::shared_ptr<void> memory(aligned_alloc(64, (size + 64) / 64 * 64), free);
    memset(memory.get(), 0xFF, size);
    Guard guard(world().lock);
    world().pinned[(char*)memory.get()] = {size, memory};
    return {memory.get(), memory.get(), &unpin, c10::kCPU};
  }
  void copy_data(void* to, const void* from, size_t size) const override { memcpy(to, from, size); }
} pinned_memory;

std::shared_ptr<void> pin(const void* p) {  // what keeps this address, if it is pinned
  Guard guard(world().lock);
  auto after = world().pinned.upper_bound((const char*)p);
  if (after == world().pinned.begin()) return nullptr;
  auto& [start, held] = *--after;
  return (const char*)p < start + std::max<size_t>(held.first, 1) ? held.second : nullptr;
}

// ---- devices, streams, events ---------------------------------------------------------------------------------------

struct Devices final : c10::impl::DeviceGuardImplInterface {
  using Device = c10::Device;
  using Stream = c10::Stream;
  static Stream stream(Device device, int64_t number) { return Stream(Stream::UNSAFE, device, number); }
  static int index(Device device) { return device.index() < 0 ? current_device : device.index(); }
  static Queue& at(const Stream& stream) { return queue_of(stream.device_index(), stream.id()); }
  c10::DeviceType type() const override { return SIM; }
  Device exchangeDevice(Device device) const override {
    Device before(SIM, current_device);
    setDevice(device);
    return before;
  }
  Device getDevice() const override { return {SIM, (c10::DeviceIndex)current_device}; }
  void setDevice(Device device) const override {
    TORCH_CHECK(index(device) < DEVICES, "sim: no device ", device);
    current_device = index(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override { current_device = index(device); }
  Stream getStream(Device device) const override {
    return stream({SIM, (c10::DeviceIndex)index(device)}, current_stream[index(device)]);
  }
  Stream getDefaultStream(Device device) const override { return stream(device, 0); }
  Stream getNewStream(Device device, int = 0) const override {
    Guard guard(world().lock);
    auto& queues = world().places[index(device)].queues;
    queues.emplace_back();
    return stream({SIM, (c10::DeviceIndex)index(device)}, queues.size() - 1);
  }
  Stream getStreamFromGlobalPool(Device device, bool = false) const override { return getNewStream(device); }
  Stream exchangeStream(Stream next) const override {
    auto before = getStream(next.device());
    current_stream[next.device_index()] = next.id();
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  void record(void** event, const Stream& on, const c10::DeviceIndex, const c10::EventFlag) const override {
    Guard guard(world().lock);
    if (!*event) *event = new Moment;
    *(Moment*)*event = now(at(on));
  }
  void block(void* event, const Stream& on) const override {
    if (event) enqueue(at(on), {}, *(Moment*)event);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete (Moment*)event; }
  bool queryEvent(void* event) const override {
    Guard guard(world().lock);
    if (!event || past(*(Moment*)event)) return true;
    step(*((Moment*)event)->queue, true);  // who asks again and again gets there
    return past(*(Moment*)event);
  }
  bool queryStream(const Stream& on) const override {
    auto end = now(at(on));
    return queryEvent(&end);
  }
  void synchronizeStream(const Stream& on) const override { wait(now(at(on))); }
  void synchronizeEvent(void* event) const override {
    if (event) wait(*(Moment*)event);
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    for (auto& queue : world().places[device < 0 ? current_device : device].queues) wait(now(queue));
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& on) const override {
    Guard guard(world().lock);
    auto found = world().blocks.find(data.get());
    if (found != world().blocks.end() && found->second->owner != &at(on)) found->second->users.insert(&at(on));
  }
};

struct Generator final : at::CPUGeneratorImpl {  // the numbers of the CPU's, and a state of its own
  explicit Generator(c10::DeviceIndex device) {
    device_ = c10::Device(SIM, device);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

}  // namespace
