/// The two passes of a call that autograd records. `call` is a flashjit._autograd.Call: its methods forward()
/// and backward() do what is not done here.

#include <algorithm>

#include "front.hpp"

namespace flashjit::torch {

namespace {

constexpr Py_ssize_t kInputs = 3;  // Q, K and V

Ref attribute(PyObject* object, const char* name) { return Ref(PyObject_GetAttrString(object, name)); }

bool set(PyObject* object, const char* name, PyObject* value) {
  return PyObject_SetAttrString(object, name, value) == 0;
}

/// Calls a method with a tuple behind the first arguments.
template <class... First>
PyObject* call_method(PyObject* object, const char* name, PyObject* rest, First... first) {
  const Ref function = attribute(object, name), before(PyTuple_Pack(sizeof...(first), first...));
  const Ref all(function && before ? PySequence_Concat(before.get(), rest) : nullptr);
  return all ? PyObject_CallObject(function.get(), all.get()) : nullptr;
}

/// What the front of the backward pass finds for dO and what was saved.
Ref find_gradients(const ModuleState& module, PyObject* call, PyObject* dout, PyObject* saved) {
  const Ref object = attribute(call, "front"), built = attribute(call, "built");
  PyObject* lists = built ? PyTuple_GetItem(built.get(), 1) : nullptr;
  const int records = module.host.records();
  if (!object || lists == nullptr || records < 0) return Ref();
  Front* front = front_of(module, object.get());
  if (front == nullptr || records != 0) return Ref(not_implemented());  // derivatives of gradients
  const Py_ssize_t most = static_cast<Py_ssize_t>(front->kinds.size()) - 2, count = PyTuple_Size(saved);
  Given given;
  given.fill(Py_None);
  auto at = given.begin();
  *at++ = dout;
  for (Py_ssize_t i = 0; i < std::min(count, most); i++) *at++ = PyTuple_GetItem(saved, i);
  given[front->kinds.size() - 1] = lists;
  return Ref(call_of(*front, given.data()));
}

}  // namespace

PyObject* recorded_forward(PyObject*, PyObject* const* args, Py_ssize_t count) {
  const Py_ssize_t first = 3, others = count - first - kInputs;
  if (others < 0) {
    PyErr_SetString(PyExc_TypeError, "recorded_forward() takes ctx, a call, its results, q, k and v");
    return nullptr;
  }
  PyObject *ctx = args[0], *call = args[1], *made = args[2];
  const bool is_made = PyTuple_CheckExact(made) != 0;
  const Ref tensors(PyTuple_New(count - first + (is_made ? 2 : 0)));
  if (!tensors) return nullptr;
  Py_ssize_t at = 0;
  const auto add = [&](PyObject* tensor) {
    PyTuple_SetItem(tensors.get(), at++, Ref::borrowed(tensor).release());
  };
  std::for_each_n(args + first, kInputs, add);
  if (is_made) add(PyTuple_GetItem(made, 0)), add(PyTuple_GetItem(made, 1));
  std::for_each_n(args + first + kInputs, others, add);
  if (!is_made) return call_method(call, "forward", tensors.get(), ctx, made);
  const Ref returns_lse = attribute(call, "returns_lse");
  if (!returns_lse || !set(ctx, "to_save", tensors.get()) || !set(ctx, "materialize_grads", Py_False) ||
      !set(ctx, "call", call))
    return nullptr;
  return Ref::borrowed(returns_lse.get() == Py_True ? made : PyTuple_GetItem(made, 0)).release();
}

PyObject* recorded_backward(PyObject* module, PyObject* const* args, Py_ssize_t count) {
  if (count < 2) {
    PyErr_SetString(PyExc_TypeError, "recorded_backward() takes ctx and the gradients of O and LSE");
    return nullptr;
  }
  const auto& state = *static_cast<const ModuleState*>(PyModule_GetState(module));
  PyObject *dout = args[1], *dlse = count > 2 ? args[2] : Py_None;
  const Ref call = attribute(args[0], "call"), saved = attribute(args[0], "saved_tensors");
  if (!call || !saved) return nullptr;
  const Ref found =
      dlse == Py_None ? find_gradients(state, call.get(), dout, saved.get()) : Ref(not_implemented());
  if (!found) return nullptr;
  if (!is_done(found)) return call_method(call.get(), "backward", saved.get(), found.get(), dout, dlse);
  const Py_ssize_t others = PyTuple_Size(saved.get()) - kInputs - 2;  // 2: O and LSE
  Ref gradients(PyTuple_New(2 + kInputs + others));                   // 2: of the call and its results
  for (Py_ssize_t i = 0; gradients && i < PyTuple_Size(gradients.get()); i++) {
    const bool is_input = i >= 2 && i < 2 + kInputs;
    PyObject* gradient = is_input ? PyTuple_GetItem(found.get(), i - 2) : Py_None;
    if (gradient == nullptr) return nullptr;
    PyTuple_SetItem(gradients.get(), i, Ref::borrowed(gradient).release());
  }
  return gradients.release();
}

}  // namespace flashjit::torch
