// What the front asks PyTorch, and the Python objects that answer.
#pragma once

#define Py_LIMITED_API 0x030A0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <utility>

#include "exchange.hpp"

namespace flashjit::torch {

/// Owns a reference.
class Ref {
 public:
  Ref() = default;
  explicit Ref(PyObject* owned) : object_(owned) {}
  Ref(Ref&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Ref& operator=(Ref&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Ref() { Py_XDECREF(object_); }

  static Ref borrowed(PyObject* object) {
    Py_XINCREF(object);
    return Ref(object);
  }
  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_ = nullptr;
};

/// How PyTorch is set, besides the tensors of a call.
struct Mood {
  bool is_plain = false;  // no mode, transform, autocast or forward AD sees the call
  bool records = false;   // autograd records what requires gradients
  bool deterministic = false;
};

class Host {
 public:
  /// Whether this process's PyTorch answers everything; else a Python exception is set.
  bool open();

  /// false: a Python exception is set. asks_all: whether modes, transforms, autocast and determinism count,
  /// else these are as in a plain call.
  bool mood(bool asks_all, Mood& mood) const;
  /// 1, 0, or -1 with a Python exception.
  int records() const;

  /// Whether it is a torch.Tensor or a Parameter, and no subclass.
  bool is_tensor(PyObject* object) const;
  /// Whether memory can be described: not of sparse, nested and meta tensors. Sets no exception.
  bool read(PyObject* tensor, Tensor& out) const;
  bool is_negated(PyObject* tensor) const;
  bool requires_grad(PyObject* tensor) const;
  /// Whether a device that tensors are on is the current one.
  bool is_current(int device_index) const;
  /// false: a Python exception is set.
  bool stream(int device_index, void*& out) const;
  /// Null: a Python exception is set.
  Ref allocate(bool on_gpu, PyObject* size, PyObject* stride, PyObject* type) const;
  /// How often something was prepared that may have changed workspaces; negative with a Python exception.
  long generation(PyObject* runtime) const;

 private:
  /// false: a Python exception is set.
  bool is_in_mode(bool& found) const;

  const ExchangeApi* api_ = nullptr;
  PyObject* forward_ad_names_ = nullptr;  // borrowed from the module
  mutable long device_count_ = 0;         // 0: not asked yet
  Ref tensor_, parameter_;
  Ref dispatch_modes_, function_modes_, transform_, grad_enabled_, autocast_, deterministic_, forward_ad_;
  Ref current_device_, count_devices_, allocate_cpu_, allocate_cuda_;
  Ref requires_grad_name_, is_neg_name_, level_name_, generation_name_;
};

}  // namespace flashjit::torch
