// Streams and memory of the simulated accelerator.
//
//   streams   are queues of operators. Whoever has to wait (synchronize, item, a copy to memory that is not pinned)
//             carries out what it waits for, and no more; the policy says what is carried out besides.
//   memory    A tensor's address is reserved and cannot be read: the host faults on it. The bytes lie at another one,
//             where the operators of the CPU reach them. New and freed memory is NaN.
//   pinned    memory lies on the host; copies read and write it when they are carried out, not when they are called.
// Whoever carries out work holds `lock` and never needs Python's.

#include <sys/mman.h>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <deque>
#include <mutex>
#include <random>
#include <set>

namespace {

using Run = std::function<void()>;
using Guard = std::lock_guard<std::recursive_mutex>;

constexpr auto SIM = c10::DeviceType::PrivateUse1;
constexpr int DEVICES = 2, HOST = 2;       // the places of memory: two devices, and pinned memory
constexpr size_t ROOM = size_t(16) << 30;  // addresses of a place; memory is taken as it is touched
enum Policy { AT_ONCE, LATE, SIDE_FIRST, RANDOM, SIDE_LAST };

// ---- streams: queues, and moments in them ---------------------------------------------------------------------------

struct Queue;
struct Moment { Queue* queue = nullptr; uint64_t number = 0; };  // when so many operators of a queue are done
struct Queue {
  std::deque<std::pair<Run, Moment>> work;  // each after a moment of another queue
  uint64_t done = 0, given = 0;
  bool side = true;
};
char* addresses(int access) {
  auto* start = mmap(nullptr, ROOM, access, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(start != MAP_FAILED, "sim: no addresses for a device");
  return (char*)start;
}
struct Place {
  char *seen = addresses(PROT_NONE), *real = addresses(PROT_READ | PROT_WRITE);  // of tensors, and of their bytes
  size_t used = 0;
  std::map<size_t, std::vector<char*>> free;  // by size
  std::deque<Queue> queues{2};                // by the number of the stream: 0 the default one, 1 gives memory back
  at::Generator generator;
};
struct World {
  std::recursive_mutex lock;
  Place places[DEVICES + 1];
  int policy = LATE;
  std::mt19937 dice;
};
World& world = *new World;  // which outlives every tensor
thread_local int current_device = 0;
thread_local int64_t current_stream[DEVICES] = {0, 0};
Queue& current(int device) { return world.places[device].queues.at(current_stream[device]); }
Moment now(Queue& queue) { return {&queue, queue.given}; }
bool past(const Moment& moment) { return !moment.queue || moment.queue->done >= moment.number; }

void wait(const Moment& moment);

bool step(Queue& queue, bool pull) {  // the next one, if nothing is in the way
  if (queue.work.empty()) return false;
  if (Moment after = queue.work.front().second; !past(after)) {
    if (pull) wait(after);
    return pull;
  }
  Run run = std::move(queue.work.front().first);
  queue.work.pop_front();
  queue.done++;
  // the operators of the CPU, without autograd, modes or autocast of whoever carries them out
  c10::impl::ForceDispatchKeyGuard keys(
      c10::DispatchKeySet(c10::DispatchKey::BackendSelect),
      c10::default_excluded_set | c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  c10::AutoGradMode grad(false);
  if (run) run();
  return true;
}

void besides() {  // what the policy has done before anything else
  for (auto& place : world.places)
    for (size_t n = 1; n < (world.policy == SIDE_FIRST ? place.queues.size() : 2); n++)
      if (step(place.queues[n], false)) return besides();
  for (int k = world.policy == RANDOM ? world.dice() % 4 : 0; k > 0; k--) {
    auto& queues = world.places[world.dice() % DEVICES].queues;
    step(queues[world.dice() % queues.size()], false);
  }
}

void wait(const Moment& moment) {
  Guard guard(world.lock);
  while (!past(moment)) {
    besides();
    if (!past(moment)) step(*moment.queue, true);
  }
}

void enqueue(Queue& queue, Run run, Moment after = {}) {
  Guard guard(world.lock);
  queue.work.emplace_back(std::move(run), after);
  queue.given++;
  if (world.policy == AT_ONCE || (world.policy == SIDE_LAST && !queue.side)) wait(now(queue));
  besides();
}

// ---- memory ---------------------------------------------------------------------------------------------------------

struct Block { Place& place; char* seen; size_t size; Queue* owner; std::set<Queue*> users; };  // users: other queues

int place_of(const void* seen) {  // -1 for any other memory of the host
  for (int n = 0; n <= HOST; n++)
    if (auto* start = world.places[n].seen; seen >= start && seen < start + ROOM) return n;
  return -1;
}

char* real(const void* seen) {
  auto& place = world.places[place_of(seen)];
  return place.real + ((const char*)seen - place.seen);
}

void give_back(void* context) {
  auto* block = (Block*)context;
  Guard guard(world.lock);
  auto erase = [block] {
    memset(real(block->seen), 0xFF, block->size);
    block->place.free[block->size].push_back(block->seen);
    delete block;
  };
  auto& queue = block->users.empty() ? *block->owner : block->place.queues[1];  // later work of its stream may have it
  for (auto* user : block->users) enqueue(queue, {}, now(*user));
  enqueue(queue, erase);
}

void uses(Queue& queue, const c10::DataPtr& data) {  // so that it is given back after what the queue does with it
  Guard guard(world.lock);
  auto* block = data.cast_context<Block>(&give_back);
  if (block && block->owner != &queue) block->users.insert({&queue, block->owner});
}

template <bool pinned>
struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    Guard guard(world.lock);
    auto& place = world.places[pinned ? HOST : current_device];
    auto device = pinned ? c10::Device(c10::kCPU) : c10::Device(SIM, current_device);
    size = (size + 64) / 64 * 64;
    auto& free = place.free[size];
    if (free.empty()) {
      TORCH_CHECK(place.used + size <= ROOM, "sim: out of memory");
      memset(place.real + place.used, 0xFF, size);
      free.push_back(place.seen + place.used);
      place.used += size;
    }
    auto* seen = free.back();  // what came back last, as it is noticed soonest
    free.pop_back();
    auto& owner = pinned ? place.queues[1] : current(current_device);
    return {seen, new Block{place, seen, size, &owner, {}}, &give_back, device};
  }
  void copy_data(void*, const void*, size_t) const override { TORCH_CHECK(false, "sim: not copied so"); }
};
Memory<false> device_memory;
Memory<true> pinned_memory;

// ---- devices, streams, events ---------------------------------------------------------------------------------------

struct Devices final : c10::impl::DeviceGuardImplInterface {
  using Device = c10::Device;
  using Stream = c10::Stream;
  static int8_t index(Device device) { return device.index() < 0 ? current_device : device.index(); }
  static Stream stream(Device device, int64_t number) { return Stream(Stream::UNSAFE, {SIM, index(device)}, number); }
  static Queue& at(const Stream& stream) { return world.places[stream.device_index()].queues.at(stream.id()); }

  c10::DeviceType type() const override { return SIM; }
  c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  Device getDevice() const override { return {SIM, index(SIM)}; }
  void setDevice(Device device) const override { current_device = index(device); }
  void uncheckedSetDevice(Device device) const noexcept override { current_device = index(device); }
  Device exchangeDevice(Device d) const override { return {SIM, (int8_t)std::exchange(current_device, index(d))}; }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    for (auto& queue : world.places[index({SIM, device})].queues) wait(now(queue));
  }

  Stream getStream(Device device) const override { return stream(device, current_stream[index(device)]); }
  Stream getDefaultStream(Device device) const override { return stream(device, 0); }
  Stream getNewStream(Device device, int = 0) const override {
    Guard guard(world.lock);
    auto& queues = world.places[index(device)].queues;
    queues.emplace_back();
    return stream(device, queues.size() - 1);
  }
  Stream exchangeStream(Stream next) const override {
    return stream(next.device(), std::exchange(current_stream[next.device_index()], next.id()));
  }
  void synchronizeStream(const Stream& on) const override { wait(now(at(on))); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& on) const override { uses(at(on), data); }

  static Moment moment(void* event) { return event ? *(Moment*)event : Moment(); }
  void record(void** event, const Stream& on, const c10::DeviceIndex, const c10::EventFlag) const override {
    delete (Moment*)std::exchange(*event, new Moment(now(at(on))));
  }
  void block(void* event, const Stream& on) const override { enqueue(at(on), {}, moment(event)); }
  void synchronizeEvent(void* event) const override { wait(moment(event)); }
  bool queryEvent(void* event) const override { Guard guard(world.lock); return past(moment(event)); }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete (Moment*)event; }
};

struct Generator final : at::CPUGeneratorImpl {  // the numbers of the CPU's, and a state of its own
  explicit Generator(c10::DeviceIndex device) {
    device_ = c10::Device(SIM, device), key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

}  // namespace
