// A simulated accelerator: devices "sim:0" and "sim:1", whose work is done late, so that what does not wait is noticed.
//
// An operator is called twice: at once with zeros on the CPU, which tells the form of what it returns, and later with
// the numbers (`fallback`). Streams and memory are in streams.h.

#include <sys/mman.h>

#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include "streams.h"

namespace {

using at::IValue;
using at::Tensor;
using torch::jit::Stack;

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return DEVICES; }
  void setCurrentDevice(c10::DeviceIndex device) const override { Devices().setDevice({SIM, device}); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return Devices().exchangeDevice({SIM, device}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return world().places[device < 0 ? current_device : device].generator;
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? current_device : device);
  }
  at::Device getDeviceFromPtr(void* data) const override {
    auto& first = world().places[0];
    return {SIM, (c10::DeviceIndex)((char*)data >= first.seen && (char*)data < first.seen + ROOM ? 0 : 1)};
  }
  bool isPinnedPtr(const void* data) const override { return pin(data) != nullptr; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override;
};

// ---- tensors --------------------------------------------------------------------------------------------------------

struct On {  // the current device, for a while
  int before = current_device;
  explicit On(c10::Device device) { current_device = Devices::index(device); }
  ~On() { current_device = before; }
};

bool ours(const Tensor& t) { return t.defined() && t.device().type() == SIM; }
bool ours(const IValue& v) { return v.isTensor() && ours(v.toTensor()); }

Tensor made(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype, c10::Device device) {
  On on(device);
  // MTIA's bit has torch take the tensor for a dense one, so that `.data` may be that of another device
  auto keys = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1) | c10::DispatchKeySet(c10::BackendComponent::MTIABit);
  return at::detail::empty_strided_generic(sizes, strides, &device_memory, keys, dtype);
}
Tensor shell(const Tensor& like, bool zeros) {
  auto options = at::TensorOptions(c10::kCPU).dtype(like.scalar_type());
  auto t = at::empty_strided(like.sizes(), like.strides(), options);
  return zeros ? t.zero_() : t;
}
Tensor reached(const Tensor& t) {  // the same elements, as operators of the CPU reach them; it keeps no memory
  auto options = at::TensorOptions(c10::kCPU).dtype(t.scalar_type());
  if (!t.numel()) return at::empty_strided(t.sizes(), t.strides(), options);
  auto* data = const_cast<void*>(t.const_data_ptr());
  return at::from_blob(t.is_cpu() ? data : real(data), t.sizes(), t.strides(), options);
}

Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  auto like = at::empty(sizes, at::TensorOptions(c10::kMeta).dtype(dtype), format);
  return made(sizes, like.strides(), like.scalar_type(), device.value_or(c10::Device(SIM)));
}
Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  auto kind = dtype.value_or(at::typeMetaToScalarType(at::get_default_dtype()));
  return made(sizes, strides, kind, device.value_or(c10::Device(SIM)));
}

void Hooks::resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const {
  auto* mine = storage.unsafeGetStorageImpl();
  On on(storage.device());
  auto fresh = device_memory.allocate(size);
  size_t kept = std::min(size, storage.nbytes());
  if (kept)
    enqueue(current(current_device),
            [to = real(fresh.get()), from = real(storage.data()), kept] { memcpy(to, from, kept); });
  mine->set_data_ptr_noswap(std::move(fresh));
  mine->set_nbytes(size);
}

const Tensor& resize(const Tensor& self, at::IntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  auto like = at::empty(sizes, self.options().device(c10::kMeta), format);
  auto* impl = self.unsafeGetTensorImpl();
  size_t needed = at::detail::computeStorageNbytes(sizes, like.strides(), self.itemsize(), self.storage_offset());
  if (like.numel() && needed > self.storage().nbytes())
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), needed);
  impl->set_sizes_and_strides(sizes, like.strides());
  return self;
}

// As on CUDA: memory that is not pinned is read when a copy is called, and waited for before it is written.
Tensor carry(const Tensor& from, const Tensor& to, bool non_blocking) {
  Tensor source = from.expand_as(to);
  auto device = ours(to) ? to.device() : from.device();
  Queue& queue = current(device.index());
  if (ours(from) && ours(to) && from.device() != to.device()) {
    Queue& sender = current(from.device().index());  // which takes part, and both know when it is over
    enqueue(sender, {}, now(queue));
    enqueue(sender, [a = reached(source), b = reached(to)] { b.copy_(a); });
    enqueue(queue, {}, now(sender));
    return to;
  }
  const Tensor& host = ours(from) ? to : from;
  auto kept = ours(host) ? nullptr : pin(host.const_data_ptr());
  bool staged = !kept && !ours(from);
  auto a = staged ? source.clone() : reached(source);
  enqueue(queue, [a, b = reached(to), kept] { b.copy_(a); });
  if (!ours(host) && !staged && (!non_blocking || !kept)) wait(now(queue));
  if (staged && !non_blocking) wait(now(queue));
  return to;
}

Tensor copy_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return carry(from, to, false);
}

at::Scalar item(const Tensor& self) {
  wait(now(current(self.device().index())));
  return reached(self).item();
}

void record_stream(Tensor& self, c10::Stream stream) {
  Devices().recordDataPtrOnStream(self.storage().data_ptr(), stream);
}

// ---- operators ------------------------------------------------------------------------------------------------------

IValue mapped(const IValue& v, const std::function<Tensor(const Tensor&)>& f) {
  if (v.isTensor()) return v.toTensor().defined() ? IValue(f(v.toTensor())) : v;
  if (v.isDevice()) return c10::Device(c10::kCPU);
  if (v.isTensorList()) {
    c10::List<Tensor> list;
    for (const auto& t : v.toTensorVector()) list.push_back(t.defined() ? f(t) : t);
    return list;
  }
  if (v.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const std::optional<Tensor>& t : v.toOptionalTensorVector())
      list.push_back(t && t->defined() ? std::optional<Tensor>(f(*t)) : t);
    return list;
  }
  return v;
}
Stack mapped(const Stack& some, const std::function<Tensor(const Tensor&)>& f) {
  Stack found;
  for (const auto& v : some) found.push_back(mapped(v, f));
  return found;
}

c10::OperatorHandle named(const std::string& name, const std::string& overload = "") {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
}

c10::OperatorHandle on_cpu(const c10::OperatorHandle& op, Stack& args) {  // what the CPU calls it
  const auto& name = op.schema().name();
  if (name == "aten::convolution_overrideable") return named("aten::convolution");
  if (name != "aten::convolution_backward_overrideable") return op;
  args.insert(args.begin() + 3, IValue());  // the size of the bias, which only the mask of outputs stands for
  return named("aten::convolution_backward");
}

// With numbers of the device's generator, on the CPU's: their order is that of the calls, as on a GPU.
void drawing(const c10::OperatorHandle& op, Stack& args, int device) {
  auto chosen = world().places[device].generator;
  auto twin = at::detail::createCPUGenerator();
  bool takes = false;
  for (size_t n = 0; n < args.size(); n++) {
    const auto& type = *op.schema().arguments()[n].type();
    if (type.str().find("Generator") == std::string::npos) continue;
    if (!args[n].isNone()) chosen = args[n].toGenerator();
    args[n] = twin;
    takes = true;
  }
  if (!takes) twin = at::detail::getDefaultCPUGenerator();
  auto before = twin.get_state();
  twin.set_state(chosen.get_state());
  op.callBoxed(&args);
  chosen.set_state(twin.get_state());
  twin.set_state(before);
}

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  size_t count = schema.arguments().size();
  Stack args(stack->end() - count, stack->end());
  stack->resize(stack->size() - count);
  int device = -1;
  std::vector<Tensor> written;
  for (size_t n = 0; n < count; n++) {
    bool indexes = schema.name().find("index") != std::string::npos;
    mapped(args[n], [&](const Tensor& t) {
      TORCH_CHECK(ours(t) || t.dim() == 0 || indexes, "sim: ", schema.name(), " of a tensor on ", t.device());
      if (!ours(t)) return t;
      TORCH_CHECK(device < 0 || device == t.device().index(), "sim: ", schema.name(), " of tensors on two devices");
      device = t.device().index();
      return t;
    });
    auto* alias = schema.arguments()[n].alias_info();
    if (alias && alias->isWrite() && args[n].isTensor()) written.push_back(args[n].toTensor());
  }
  if (device < 0) device = current_device;
  c10::Device where(SIM, device);
  bool whole = true;  // all that comes back are tensors, whose form is known before their numbers
  for (const auto& r : schema.returns()) {
    whole = whole && (r.type()->isSubtypeOf(*c10::TensorType::get()) || r.type()->str() == "Tensor[]");
    TORCH_CHECK(!r.alias_info() || r.alias_info()->isWrite(), "sim: ", schema.name(), " is a view that it lacks");
  }
  whole = whole && !op.hasTag(at::Tag::data_dependent_output) && !op.hasTag(at::Tag::dynamic_output_shape);
  bool draws = op.hasTag(at::Tag::nondeterministic_seeded);
  Queue& queue = current(device);
  Stack returned, others = args;
  auto target = on_cpu(op, others);
  size_t next = 0;
  Plain plain;

  if (draws && ours(args[0]) && written.size() == 1) {  // it fills a tensor, whatever there was
    auto numbers = shell(written[0], false);
    others[0] = numbers;
    drawing(op, others, device);
    carry(numbers, written[0], true);
    return stack->push_back(args[0]);
  }

  Stack shadows;
  if (whole && !draws) try {
      shadows = mapped(others, [](const Tensor& t) { return ours(t) ? shell(t, true) : t.clone(); });
      std::vector<Tensor> outs;
      for (size_t n = 0; n < count; n++)
        if (auto* alias = schema.arguments()[n].alias_info(); alias && alias->isWrite() && args[n].isTensor())
          outs.push_back(shadows[n].toTensor());
      target.callBoxed(&shadows);
      for (size_t k = 0; k < outs.size(); k++)
        if (outs[k].sizes() != written[k].sizes()) written[k].resize_(outs[k].sizes());
    } catch (const c10::Error&) {
      whole = false;  // not with zeros
    }

  // An operator may resize its output while it works, so it gets another one, whose numbers are taken over.
  auto values = mapped(others, [](const Tensor& t) { return ours(t) ? reached(t) : t.clone(); });
  std::vector<std::pair<Tensor, Tensor>> outputs;
  for (size_t n = 0; n < count; n++)
    if (schema.arguments()[n].kwarg_only() && schema.arguments()[n].alias_info() && args[n].isTensor()) {
      outputs.emplace_back(shell(args[n].toTensor(), false), reached(args[n].toTensor()));
      values[n] = outputs.back().first;
    }
  auto take_over = [outputs] {
    for (auto& [found, place] : outputs) place.copy_(found);
  };

  if (!whole || draws) {  // it needs its numbers now
    wait(now(queue));
    draws ? drawing(target, values, device) : target.callBoxed(&values);
    take_over();
    for (size_t k = 0; k < schema.returns().size(); k++) {
      if (schema.returns()[k].alias_info()) {
        stack->push_back(written[next++]);
        continue;
      }
      stack->push_back(mapped(values[k], [&](const Tensor& t) {
        auto there = made(t.sizes(), t.strides(), t.scalar_type(), where);
        reached(there).copy_(t);
        return there;
      }));
    }
    return;
  }

  std::vector<Tensor> fresh;
  for (size_t k = 0; k < schema.returns().size(); k++) {
    if (schema.returns()[k].alias_info()) {
      stack->push_back(written[next++]);
      continue;
    }
    stack->push_back(mapped(shadows[k], [&](const Tensor& t) {
      auto there = made(t.sizes(), t.strides(), t.scalar_type(), where);
      fresh.push_back(reached(there));
      return there;
    }));
  }
  bool copies = written.empty();
  enqueue(queue, [target, values, fresh, copies, take_over]() mutable {
    target.callBoxed(&values);
    take_over();
    size_t at = 0;
    for (const auto& v : values)
      if (copies) mapped(v, [&](const Tensor& t) {
          TORCH_CHECK(t.sizes() == fresh.at(at).sizes(), "sim: ", target.schema().name(), ": sizes depend on numbers");
          return fresh[at++].copy_(t);
        });
  });
}

// As the CPU does it, which has no operator of its own for it.
std::tuple<Tensor, Tensor> dropout(const Tensor& x, double p, std::optional<bool> train) {
  if (!train.value_or(true) || p == 0) return {x.clone(), at::ones_like(x, x.options().dtype(at::kBool))};
  auto noise = at::empty_like(x).bernoulli_(1 - p);
  auto mask = noise.to(at::kBool);
  return {x * noise.div_(1 - p), mask};
}

bool begun = [] {
  for (int n = 0; n < DEVICES; n++) {
    auto& place = world().places[n];
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    place.seen = (char*)mmap(nullptr, ROOM, PROT_NONE, flags, -1, 0);
    place.real = (char*)mmap(nullptr, ROOM, PROT_READ | PROT_WRITE, flags, -1, 0);
    TORCH_CHECK(place.seen != MAP_FAILED && place.real != MAP_FAILED, "sim: no addresses for a device");
    place.queues.resize(2);
    place.queues[0].side = false;
    place.generator = at::make_generator<Generator>(n);
  }
  c10::SetAllocator(SIM, &device_memory);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

C10_REGISTER_GUARD_IMPL(PrivateUse1, Devices);

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("resize_", &resize);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("set_.source_Storage", static_cast<Tensor& (*)(Tensor&, at::Storage)>(&at::native::set_));
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("_copy_from", &carry);
  m.impl("_copy_from_and_resize", &copy_and_resize);
  m.impl("_local_scalar_dense", &item);
  m.impl("record_stream", &record_stream);
  m.impl("native_dropout", &dropout);
  for (auto name : {"convolution_overrideable", "convolution_backward_overrideable", "native_layer_norm",
                    "native_group_norm", "silu_backward", "mish_backward", "addr", "_stack"})  // else not the CPU's
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY(sim, m) {
  m.def("policy(int number, int seed) -> ()", [](int64_t number, int64_t seed) {
    Guard guard(world().lock);
    world().policy = number;
    world().dice.seed(seed);
  });
  m.def("generator(int device) -> Generator?", [](int64_t device) -> std::optional<at::Generator> {
    return world().places[device].generator;
  });
}

}  // namespace
