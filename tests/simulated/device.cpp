// A simulated accelerator: devices "sim:0" and "sim:1", whose work is done late, so that what does not wait is noticed.
// An operator is called twice: at once with zeros on the CPU, which tells the form of what it returns, and later with
// the numbers (`fallback`). Streams and memory are in streams.h.

#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "streams.h"

namespace {

using at::IValue;
using at::Tensor;
using torch::jit::Stack;

// ---- tensors --------------------------------------------------------------------------------------------------------

bool ours(const Tensor& t) { return t.defined() && t.device().type() == SIM; }

Tensor made(const Tensor& form, c10::Device device) {
  c10::DeviceGuard on(device);
  // MTIA's bit has torch take the tensor for a dense one, so that `.data` may be that of another device
  auto keys = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1) | c10::DispatchKeySet(c10::BackendComponent::MTIABit);
  return at::detail::empty_strided_generic(form.sizes(), form.strides(), &device_memory, keys, form.scalar_type());
}
Tensor zeros(const Tensor& t) { return at::empty_strided(t.sizes(), t.strides(), t.options().device(c10::kCPU)).zero_(); }
Tensor reached(const Tensor& t) {  // the same elements, as operators of the CPU reach them; it keeps no memory
  if (!t.numel()) return zeros(t);
  auto* data = const_cast<void*>(t.const_data_ptr());
  return at::from_blob(ours(t) ? real(data) : data, t.sizes(), t.strides(), t.options().device(c10::kCPU));
}

const Tensor& resize(const Tensor& self, at::IntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  auto like = at::empty(sizes, self.options().device(c10::kMeta), format);
  size_t needed = at::detail::computeStorageNbytes(sizes, like.strides(), self.itemsize(), self.storage_offset());
  if (like.numel() && needed > self.storage().nbytes())
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), needed);
  self.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, like.strides());
  return self;
}

// As on CUDA: memory that is not pinned is read when a copy is called, and waited for before it is written.
Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  Tensor source = from.expand_as(to);
  Queue& queue = current((ours(to) ? to : from).device().index());
  if (ours(from) && ours(to)) {
    Queue& sender = current(from.device().index());  // which takes part, and both know when it is over
    enqueue(sender, [a = reached(source), b = reached(to)] { b.copy_(a); }, now(queue));
    enqueue(queue, {}, now(sender));
    return to;
  }
  const Tensor& host = ours(from) ? to : from;
  bool pinned = place_of(host.const_data_ptr()) == HOST;
  bool read_now = !ours(from) && !pinned;
  if (pinned) uses(queue, host.storage().data_ptr());
  enqueue(queue, [a = read_now ? source.clone() : reached(source), b = reached(to)] { b.copy_(a); });
  if (!ours(host) && !(non_blocking && (pinned || read_now))) wait(now(queue));
  return to;
}

// As the CPU does it, which has no operator of its own for it.
std::tuple<Tensor, Tensor> dropout(const Tensor& x, double p, std::optional<bool> train) {
  if (!train.value_or(true) || p == 0) return {x.clone(), at::ones_like(x, x.options().dtype(at::kBool))};
  auto noise = at::empty_like(x).bernoulli_(1 - p);
  auto mask = noise.to(at::kBool);
  return {x * noise.div_(1 - p), mask};
}

// ---- all other operators --------------------------------------------------------------------------------------------

Stack mapped(Stack values, const std::function<Tensor(const Tensor&)>& f) {  // with other tensors, and on the CPU
  for (auto& v : values)
    if (v.isTensor() && v.toTensor().defined()) v = f(v.toTensor());
    else if (v.isDevice()) v = c10::Device(c10::kCPU);
    else if (v.isList()) {
      auto list = v.toList().copy();
      for (size_t n = 0; n < list.size(); n++) list.set(n, mapped({list.get(n)}, f)[0]);
      v = list;
    }
  return values;
}

c10::OperatorHandle on_cpu(const c10::OperatorHandle& op, Stack& args) {  // what the CPU calls it
  const auto& name = op.schema().name();
  auto end = name.find("_overrideable");
  if (end == std::string::npos) return op;
  if (name.find("backward") != std::string::npos)
    args.insert(args.begin() + 3, IValue());  // the size of the bias, which only the mask of outputs stands for
  return c10::Dispatcher::singleton().findSchemaOrThrow(name.substr(0, end).c_str(), "");
}

Tensor call(const c10::OperatorHandle& op, Stack& values, const Tensor& state) {  // of a generator, if it draws
  auto twin = at::detail::createCPUGenerator();
  if (state.defined()) twin.set_state(state);
  for (size_t n = 0; n < values.size(); n++)
    if (op.schema().arguments()[n].type()->str().find("Generator") != std::string::npos) values[n] = twin;
  auto kept = values;  // torch 2.11 gives back outputs that it was given, and has let them go by then
  op.callBoxed(&values);
  return twin.get_state();
}

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  const auto& name = op.schema().name();
  const auto& returns = op.schema().returns();
  auto args = torch::jit::pop(*stack, op.schema().arguments().size());

  int device = current_device, taken = 0;
  for (const auto& v : args)
    if (v.isDevice()) device = Devices::index(v.toDevice());
  mapped(args, [&](const Tensor& t) {
    bool fits = ours(t) ? !taken || device == t.device().index() : !t.dim() || name.find("index") != std::string::npos;
    TORCH_CHECK(fits, "sim: ", name, " of a tensor on ", t.device());
    if (ours(t)) device = t.device().index(), taken++;
    return t;
  });
  Queue& queue = current(device);

  auto generator = world.places[device].generator;  // numbers are drawn in the order of the calls, as on a GPU
  for (const auto& v : args)
    if (v.isGenerator()) generator = v.toGenerator();
  auto state = op.hasTag(at::Tag::nondeterministic_seeded) ? generator.get_state() : Tensor(), after = state;
  bool late = !op.hasTag(at::Tag::data_dependent_output) && !op.hasTag(at::Tag::dynamic_output_shape);
  for (const auto& r : returns) {
    TORCH_CHECK(!r.alias_info() || r.alias_info()->isWrite(), "sim: ", name, " is a view that it lacks");
    late = late && (r.type()->isSubtypeOf(*c10::TensorType::get()) || r.type()->str() == "Tensor[]");
  }
  Stack others = args;
  auto target = on_cpu(op, others);
  auto values = mapped(others, [](const Tensor& t) { return ours(t) ? reached(t) : t.clone(); });
  std::vector<Tensor> written;
  for (size_t n = 0; n < args.size(); n++) {
    const auto& argument = op.schema().arguments()[n];
    if (!argument.alias_info() || !argument.alias_info()->isWrite() || !args[n].isTensor()) continue;
    written.push_back(args[n].toTensor());
    if (argument.kwarg_only()) values[n] = zeros(written.back());  // an operator may resize its output
  }

  auto returned = mapped(others, [](const Tensor& t) { return ours(t) ? zeros(t) : t.clone(); });
  if (late) try {
      after = call(target, returned, state);
    } catch (const c10::Error&) {
      late = false;  // not with zeros
    }
  if (!late) {  // it needs its numbers now
    wait(now(queue));
    after = call(target, values, state);
    returned = values;
  }
  if (state.defined()) generator.set_state(after);

  std::vector<Tensor> places;  // of what it returns
  for (size_t k = 0, next = 0; k < returns.size(); k++)
    stack->push_back(mapped({returned[k]}, [&](const Tensor& t) {
      auto place = returns[k].alias_info() ? written.at(next++) : made(t, {SIM, (c10::DeviceIndex)device});
      if (place.sizes() != t.sizes()) place.resize_(t.sizes());
      places.push_back(reached(place));
      return place;
    })[0]);
  if (name.rfind("aten::empty", 0) == 0) return;  // it stays NaN
  enqueue(queue, [=]() mutable {
    if (late) call(target, values, state);
    size_t at = 0;
    mapped(values, [&](const Tensor& t) { return places.at(at++).copy_(t); });
  });
}

// ---- what torch asks for --------------------------------------------------------------------------------------------

struct Hooks final : at::PrivateUse1HooksInterface {
  using Index = c10::DeviceIndex;
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(Index) const override { return true; }
  Index deviceCount() const override { return DEVICES; }
  static Index at(Index device) { return device < 0 ? current_device : device; }
  const at::Generator& getDefaultGenerator(Index n) const override { return world.places[at(n)].generator; }
  at::Generator getNewGenerator(Index n) const override { return at::make_generator<Generator>(at(n)); }
  bool isPinnedPtr(const void* data) const override { return place_of(data) == HOST; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    c10::DeviceGuard on(storage.device());
    auto fresh = device_memory.allocate(size);
    if (size_t kept = std::min(size, storage.nbytes()))
      enqueue(current(current_device),
              [to = real(fresh.get()), from = real(storage.data()), kept] { memcpy(to, from, kept); });
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(size);
  }
};

bool begun = [] {
  for (int n = 0; n < DEVICES; n++) {
    world.places[n].queues[0].side = false;
    world.places[n].generator = at::make_generator<Generator>(n);
  }
  world.places[HOST].seen = world.places[HOST].real;
  c10::SetAllocator(SIM, &device_memory);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

C10_REGISTER_GUARD_IMPL(PrivateUse1, Devices);

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("resize_", &resize);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("set_.source_Storage", static_cast<Tensor& (*)(Tensor&, at::Storage)>(&at::native::set_));
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("_copy_from", &copy_from);
  m.impl("native_dropout", &dropout);
  m.impl("record_stream", [](Tensor& t, c10::Stream stream) { uses(Devices::at(stream), t.storage().data_ptr()); });
  for (auto name : {"convolution_overrideable", "convolution_backward_overrideable", "native_layer_norm",
                    "native_group_norm", "silu_backward", "mish_backward", "addr", "_stack"})  // else not the CPU's
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY(sim, m) {
  m.def("policy(int number) -> ()", [](int64_t number) { world.policy = number, world.dice.seed(0); });
  m.def("generator(int device) -> Generator?",
        [](int64_t device) -> std::optional<at::Generator> { return world.places[device].generator; });
}

}  // namespace
