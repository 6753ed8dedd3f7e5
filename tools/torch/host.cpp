#include "host.hpp"

#include <cstddef>

namespace flashjit::torch {

namespace {

/// An attribute of attributes, such as "_C", "_functorch"; null with a Python exception.
template <class... Names>
Ref attribute_of(const Ref& from, const char* name, Names... names) {
  if (!from) {
    return Ref();
  }
  Ref found(PyObject_GetAttrString(from.get(), name));
  if constexpr (sizeof...(names) > 0) {
    return attribute_of(found, names...);
  } else {
    return found;
  }
}

/// 1, 0, or -1 with a Python exception.
int truth_of(const Ref& function) {
  const Ref answer(PyObject_CallNoArgs(function.get()));
  return answer ? PyObject_IsTrue(answer.get()) : -1;
}

bool is_true(PyObject* owned) {
  const Ref answer(owned);
  if (!answer) {
    PyErr_Clear();
    return true;  // the caller of both questions then leaves the call to Python
  }
  return answer.get() != Py_False;
}

}  // namespace

bool Host::open() {
  const Ref torch(PyImport_ImportModule("torch"));
  const Ref c = attribute_of(torch, "_C");
  const Ref guards(PyImport_ImportModule("torch._C._dynamo.guards"));
  forward_ad_ = Ref(PyImport_ImportModule("torch.autograd.forward_ad"));
  tensor_ = attribute_of(torch, "Tensor");
  parameter_ = attribute_of(torch, "nn", "Parameter");
  dispatch_modes_ = attribute_of(c, "_len_torch_dispatch_stack");
  function_modes_ = attribute_of(c, "_len_torch_function_stack");
  transform_ = attribute_of(c, "_functorch", "peek_interpreter_stack");
  grad_enabled_ = attribute_of(c, "is_grad_enabled");
  autocast_ = attribute_of(c, "_is_any_autocast_enabled");
  deterministic_ = attribute_of(c, "_get_deterministic_algorithms");
  allocate_cpu_ = attribute_of(guards, "_empty_strided_cpu");
  allocate_cuda_ = attribute_of(guards, "_empty_strided_cuda");
  requires_grad_name_ = Ref(PyUnicode_InternFromString("requires_grad"));
  is_neg_name_ = Ref(PyUnicode_InternFromString("is_neg"));
  level_name_ = Ref(PyUnicode_InternFromString("_current_level"));
  generation_name_ = Ref(PyUnicode_InternFromString("generation"));
  forward_ad_names_ = forward_ad_ ? PyModule_GetDict(forward_ad_.get()) : nullptr;
  const Ref capsule = attribute_of(tensor_, "__dlpack_c_exchange_api__");
  if (!capsule || PyErr_Occurred()) {
    return false;
  }
  current_device_ = attribute_of(c, "_cuda_getDevice");
  if (current_device_) {
    count_devices_ = attribute_of(c, "_cuda_getDeviceCount");
  }
  if (!count_devices_) {  // a PyTorch without CUDA
    PyErr_Clear();
  }
  api_ = static_cast<const ExchangeApi*>(PyCapsule_GetPointer(capsule.get(), kExchangeCapsule));
  if (api_ == nullptr) {
    return false;
  }
  if (api_->major != kExchangeMajor || api_->read == nullptr || api_->current_stream == nullptr) {
    PyErr_SetString(PyExc_ImportError, "this PyTorch's exchange API is another one");
    return false;
  }
  return true;
}

bool Host::is_in_mode(bool& found) const {
  for (const Ref* modes : {&dispatch_modes_, &function_modes_}) {
    const int count = truth_of(*modes);
    if (count != 0) {
      found = true;
      return count > 0;
    }
  }
  const Ref transform(PyObject_CallNoArgs(transform_.get()));
  found = transform && transform.get() != Py_None;
  return static_cast<bool>(transform);
}

bool Host::mood(bool asks_all, Mood& mood) const {
  bool is_in_mode = false;
  if (asks_all && !this->is_in_mode(is_in_mode)) {
    return false;
  }
  PyObject* level = PyDict_GetItemWithError(forward_ad_names_, level_name_.get());
  if (level == nullptr) {
    return false;
  }
  if (is_in_mode || PyLong_AsLong(level) >= 0) {
    return true;
  }
  const int records = this->records();
  const int autocast = asks_all ? truth_of(autocast_) : 0;
  const int deterministic = asks_all ? truth_of(deterministic_) : 0;
  if (PyErr_Occurred() != nullptr) {
    return false;
  }
  mood = {autocast == 0, records > 0, deterministic > 0};
  return true;
}

int Host::records() const { return truth_of(grad_enabled_); }

bool Host::is_tensor(PyObject* object) const {
  PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(object));
  return type == tensor_.get() || type == parameter_.get();
}

bool Host::read(PyObject* tensor, Tensor& out) const {
  if (api_->read(tensor, &out) == 0) {
    return true;
  }
  PyErr_Clear();
  return false;
}

bool Host::is_negated(PyObject* tensor) const {
  return is_true(PyObject_CallMethodObjArgs(tensor, is_neg_name_.get(), nullptr));
}

bool Host::requires_grad(PyObject* tensor) const {
  return is_true(PyObject_GetAttr(tensor, requires_grad_name_.get()));
}

bool Host::is_current(int device_index) const {
  if (!count_devices_) {
    return false;
  }
  const auto number_of = [](const Ref& function) {
    const Ref number(PyObject_CallNoArgs(function.get()));
    const long found = number ? PyLong_AsLong(number.get()) : -1;
    PyErr_Clear();
    return found;
  };
  if (device_count_ == 0) {
    device_count_ = number_of(count_devices_);
  }
  return device_count_ == 1 || number_of(current_device_) == device_index;
}

bool Host::stream(int device_index, void*& out) const {
  return api_->current_stream(kCuda, device_index, &out) == 0;
}

Ref Host::allocate(bool on_gpu, PyObject* size, PyObject* stride, PyObject* type) const {
  return Ref(PyObject_CallFunctionObjArgs((on_gpu ? allocate_cuda_ : allocate_cpu_).get(), size, stride, type,
                                          nullptr));
}

long Host::generation(PyObject* runtime) const {
  const Ref number(PyObject_GetAttr(runtime, generation_name_.get()));
  return number ? PyLong_AsLong(number.get()) : -1;
}

}  // namespace flashjit::torch
