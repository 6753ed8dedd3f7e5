/// What a Python function did for its arguments, done again for arguments that look alike, without Python:
/// flashjit's Python package remembers here how it launched, and asks here first.
///
/// A call's key is all that its launch depends on: layouts of tensors, values of numbers and switches. Memory
/// is no part of it but for its alignment. A call that is not plain (modes, transforms, subclasses, negative
/// views, another device) is left to Python, which has the same results and all messages.

#include "front.hpp"

#include <structmember.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <new>
#include <utility>

namespace flashjit::torch {

namespace {

constexpr long kInterface = 6;  // of both files: this one and flashjit/_front.py

/// Python's vectorcall protocol, which is the same in all versions, and in the limited API from 3.12 on.
using Vectorcall = PyObject* (*)(PyObject* self, PyObject* const* args, size_t count, PyObject* names);
constexpr unsigned long kHasVectorcall = 1ul << 11;
constexpr size_t kCountOfVectorcall = ~(size_t{1} << (8 * sizeof(size_t) - 1));

struct FrontObject {
  PyObject_HEAD Front* front;
  Vectorcall vectorcall;
};

bool is_handed_on(char kind) { return kind == kTensor || kind == kLists; }

/// Calls a remembered Python function with what was launched or None, tensors and lists of the call, and what
/// its programs capture.
PyObject* call_function(const Front& front, const Record& record, PyObject* made, PyObject* const* args,
                        const Arguments& found) {
  std::array<PyObject*, kMostParameters + kMostCaptured> tensors;
  std::size_t count = 0;
  for (std::size_t i = 0; i < front.kinds.size(); i++) {
    if (is_handed_on(front.kinds[i])) tensors[count++] = args[i];
  }
  for (std::size_t i = 0; i < found.captured_count; i++) tensors[count++] = found.captured[i];
  const auto given = static_cast<Py_ssize_t>(record.places.size());
  const Ref tuple(PyTuple_New(1 + given));
  if (tuple) PyTuple_SetItem(tuple.get(), 0, Ref::borrowed(made).release());
  for (Py_ssize_t i = 0; tuple && i < given; i++) {
    // Negative: a large number.
    const auto place = static_cast<std::size_t>(record.places[static_cast<std::size_t>(i)]);
    PyTuple_SetItem(tuple.get(), 1 + i, Ref::borrowed(place < count ? tensors[place] : Py_None).release());
  }
  return tuple ? PyObject_CallObject(record.function.get(), tuple.get()) : nullptr;
}

bool has_count(const Front& front, Py_ssize_t count) {
  if (count == static_cast<Py_ssize_t>(front.kinds.size())) return true;
  PyErr_Format(PyExc_TypeError, "a front of %zu parameters is given %zd", front.kinds.size(), count);
  return false;
}

PyObject* front_arguments(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  const Front& front = *reinterpret_cast<FrontObject*>(self)->front;
  Given given;
  if (!place_arguments(front, args, count, names, given)) return not_implemented();
  Ref tuple(PyTuple_New(static_cast<Py_ssize_t>(front.kinds.size())));
  for (std::size_t i = 0; tuple && i < front.kinds.size(); i++) {
    PyTuple_SetItem(tuple.get(), static_cast<Py_ssize_t>(i), Ref::borrowed(given[i]).release());
  }
  return tuple.release();
}

/// Keys that are met once, such as lengths that grow, are not worth to be remembered.
bool is_met_again(Front& front, const Key& key) {
  const uint64_t hash = Hash{}(key.bytes());
  uint64_t& place = front.seen[hash % front.seen.size()];
  return std::exchange(place, hash) == hash;
}

}  // namespace

PyObject* call_of(Front& front, PyObject* const* args) {
  Arguments found;
  switch (read_arguments(front, args, found)) {
    case Reading::failed:
      return nullptr;
    case Reading::not_plain:
      return not_implemented();
    case Reading::done:
      break;
  }
  const auto at = front.records.find(found.key.bytes());
  if (at == front.records.end())
    return is_met_again(front, found.key) ? Ref::borrowed(Py_None).release() : not_implemented();
  const std::shared_ptr<const Record> record = at->second;
  if (record->is_refused) return not_implemented();
  Ref made = record->launches() ? Ref(run(*front.host, record->launch, args, found)) : Ref::borrowed(Py_None);
  if (!record->function || (record->launches() && !is_done(made)) || !made) return made.release();
  return call_function(front, *record, made.get(), args, found);
}

bool is_done(const Ref& found) {
  return !found || (found.get() != Py_None && found.get() != Py_NotImplemented);
}

Front* front_of(const ModuleState& module, PyObject* object) {
  return PyObject_TypeCheck(object, module.front_type) == 0 ? nullptr
                                                            : reinterpret_cast<FrontObject*>(object)->front;
}

namespace {

PyObject* front_call(PyObject* self, PyObject* const* given, Py_ssize_t count, PyObject* names) {
  Front& front = *reinterpret_cast<FrontObject*>(self)->front;
  Given placed;
  if (!place_arguments(front, given, count, names, placed)) return not_implemented();
  return call_of(front, placed.data());
}

/// What the front does not do in a call of the object itself: the method _call() does, which is told whether
/// it is to be remembered.
PyObject* call_otherwise(PyObject* self, const Ref& found, PyObject* args, PyObject* named) {
  const Ref otherwise(PyObject_GetAttrString(self, "_call"));
  const Ref is_new(PyTuple_Pack(1, found.get() == Py_None ? Py_True : Py_False));
  if (!otherwise || !is_new) return nullptr;
  const Ref all(PySequence_Concat(is_new.get(), args));
  return all ? PyObject_Call(otherwise.get(), all.get(), named) : nullptr;
}

PyObject* front_call_itself(PyObject* self, PyObject* args, PyObject* named) {
  Front& front = *reinterpret_cast<FrontObject*>(self)->front;
  Given placed;
  Ref found(place_arguments(front, args, named, placed) ? call_of(front, placed.data()) : not_implemented());
  return is_done(found) ? found.release() : call_otherwise(self, found, args, named);
}

/// The same without a tuple and a dict. Python takes it for classes that derive from the type from 3.12 on.
PyObject* front_vectorcall(PyObject* self, PyObject* const* given, size_t counted, PyObject* names) {
  Front& front = *reinterpret_cast<FrontObject*>(self)->front;
  const auto count = static_cast<Py_ssize_t>(counted & kCountOfVectorcall);
  Given placed;
  Ref found(place_arguments(front, given, count, names, placed) ? call_of(front, placed.data())
                                                                : not_implemented());
  if (is_done(found)) return found.release();
  const Ref args(PyTuple_New(count)), named(PyDict_New());
  if (!args || !named) return nullptr;
  for (Py_ssize_t i = 0; i < count; i++) PyTuple_SetItem(args.get(), i, Ref::borrowed(given[i]).release());
  for (Py_ssize_t i = 0; names != nullptr && i < PyTuple_Size(names); i++) {
    if (PyDict_SetItem(named.get(), PyTuple_GetItem(names, i), given[count + i]) != 0) return nullptr;
  }
  return call_otherwise(self, found, args.get(), named.get());
}

// --- What Python remembers ---

/// Reads (place, word) pairs.
bool read_inputs(PyObject* list, std::size_t places, std::size_t words, std::vector<Input>& inputs) {
  for (Py_ssize_t i = 0; i < PyTuple_Size(list); i++) {
    Py_ssize_t place = 0, word = 0;
    if (!PyArg_ParseTuple(PyTuple_GetItem(list, i), "nn", &place, &word)) return false;
    if (static_cast<std::size_t>(place) >= places || static_cast<std::size_t>(word) >= words) {
      PyErr_SetString(PyExc_IndexError, "an input is outside of the call");
      return false;
    }
    inputs.push_back({static_cast<std::size_t>(place), static_cast<std::size_t>(word)});
  }
  return true;
}

/// Reads (parameter or -1, word, size, stride, type) of each.
bool read_results(PyObject* list, std::size_t parameters, std::size_t words, std::vector<Result>& results) {
  const Py_ssize_t count = PyTuple_Size(list);
  for (Py_ssize_t i = 0; i < count; i++) {
    Py_ssize_t parameter = 0, word = 0;
    PyObject *size = nullptr, *stride = nullptr, *type = nullptr;
    if (!PyArg_ParseTuple(PyTuple_GetItem(list, i), "nnOOO", &parameter, &word, &size, &stride, &type))
      return false;
    const bool fits =
        parameter < static_cast<Py_ssize_t>(parameters) && static_cast<std::size_t>(word) < words;
    if (!fits || count < 1 || count > static_cast<Py_ssize_t>(kMostResults)) {
      PyErr_SetString(PyExc_IndexError, "a result is outside of the call");
      return false;
    }
    results.push_back({static_cast<std::size_t>(std::max<Py_ssize_t>(parameter, 0)), parameter >= 0,
                       static_cast<std::size_t>(word), Ref::borrowed(size), Ref::borrowed(stride),
                       Ref::borrowed(type)});
  }
  return true;
}

bool read_words(PyObject* bytes, std::vector<uint64_t>& words) {
  char* data = nullptr;
  Py_ssize_t size = 0;
  if (PyBytes_AsStringAndSize(bytes, &data, &size) != 0) return false;
  if (size % 8 != 0 || static_cast<std::size_t>(size) > kMostWords * 8) {
    PyErr_SetString(PyExc_ValueError, "the struct has another size than the front expects");
    return false;
  }
  words.resize(static_cast<std::size_t>(size) / 8);
  std::memcpy(words.data(), data, static_cast<std::size_t>(size));
  return true;
}

bool read_workspace(PyObject* given, std::size_t words, Launch& launch) {
  if (given == Py_None) return true;
  Py_ssize_t word = 0;
  PyObject *size = nullptr, *stride = nullptr, *type = nullptr;
  if (!PyArg_ParseTuple(given, "nOOO", &word, &size, &stride, &type)) return false;
  if (static_cast<std::size_t>(word) >= words) {
    PyErr_SetString(PyExc_IndexError, "the workspace is outside of the call");
    return false;
  }
  launch.workspace_word = static_cast<std::size_t>(word);
  launch.workspace_size = Ref::borrowed(size);
  launch.workspace_stride = Ref::borrowed(stride);
  launch.workspace_type = Ref::borrowed(type);
  return true;
}

/// Arguments in a tuple.
Reading read_tuple(const Front& front, PyObject* args, Arguments& found) {
  const Py_ssize_t count = PyTuple_Size(args);
  if (count < 0 || !has_count(front, count)) return Reading::failed;
  Given given;
  for (Py_ssize_t i = 0; i < count; i++) given[static_cast<std::size_t>(i)] = PyTuple_GetItem(args, i);
  return read_arguments(front, given.data(), found);
}

/// Keeps the record under the key of the arguments. False: these are not plain.
PyObject* keep(Front& front, PyObject* args, const std::shared_ptr<Record>& made) {
  Arguments found;
  const Reading reading = read_tuple(front, args, found);
  if (reading == Reading::failed) return nullptr;
  Records forgotten;
  std::shared_ptr<const Record> record;
  if (reading == Reading::done) {
    if (found.program) made->form = Ref::borrowed(PyTuple_GetItem(found.program.get(), 0));
    record = made;
    if (front.records.size() >= front.most_records) std::swap(front.records, forgotten);
    std::swap(front.records[std::string(found.key.bytes())], record);  // the old one ends after this
  }
  return PyBool_FromLong(reading == Reading::done);
}

/// What the programs of a call capture: (name, tensor) in the order of their places behind the parameters.
PyObject* front_captured(PyObject* self, PyObject* args) {
  const Front& front = *reinterpret_cast<FrontObject*>(self)->front;
  if (PyTuple_CheckExact(args) == 0) {
    PyErr_SetString(PyExc_TypeError, "give the arguments as a tuple");
    return nullptr;
  }
  Arguments found;
  const Reading reading = read_tuple(front, args, found);
  if (reading == Reading::failed) return nullptr;
  const std::size_t count = reading == Reading::done ? found.captured_count : 0;
  Ref pairs(PyTuple_New(static_cast<Py_ssize_t>(count)));
  for (std::size_t i = 0; pairs && i < count; i++) {
    PyObject* pair = PyTuple_Pack(2, found.names[i], found.captured[i]);
    if (pair == nullptr) return nullptr;
    PyTuple_SetItem(pairs.get(), static_cast<Py_ssize_t>(i), pair);
  }
  return pairs.release();
}

bool read_places(PyObject* list, std::vector<Py_ssize_t>& places) {
  for (Py_ssize_t i = 0; i < PyTuple_Size(list); i++)
    places.push_back(PyLong_AsSsize_t(PyTuple_GetItem(list, i)));
  return PyErr_Occurred() == nullptr;
}

PyObject* front_remember(PyObject* self, PyObject* arguments) {
  Front& front = *reinterpret_cast<FrontObject*>(self)->front;
  PyObject *args = nullptr, *owner = nullptr, *runtime = nullptr, *words = nullptr;
  PyObject *inputs = nullptr, *results = nullptr, *workspace = nullptr;
  PyObject *function_of_results = nullptr, *places = nullptr;
  unsigned long long function = 0, runtime_address = 0, spec = 0;
  Py_ssize_t captures_pointer = 0, captures_words = 0;
  int as_tuple = 0;
  const auto record = std::make_shared<Record>();
  Launch& launch = record->launch;
  if (!PyArg_ParseTuple(arguments, "O!OOlKKKiSnnO!O!pO|OO!:remember", &PyTuple_Type, &args, &owner, &runtime,
                        &launch.generation, &function, &runtime_address, &spec, &launch.device_index, &words,
                        &captures_pointer, &captures_words, &PyTuple_Type, &inputs, &PyTuple_Type, &results,
                        &as_tuple, &workspace, &function_of_results, &PyTuple_Type, &places)) {
    return nullptr;
  }
  const std::size_t parameters = front.kinds.size();
  if (!read_words(words, launch.words) ||
      !read_inputs(inputs, parameters + kMostCaptured, launch.words.size(), launch.inputs) ||
      !read_results(results, parameters, launch.words.size(), launch.results) ||
      !read_workspace(workspace, launch.words.size(), launch)) {
    return nullptr;
  }
  const bool are_inside =
      static_cast<std::size_t>(std::max(captures_pointer, captures_words)) < launch.words.size();
  if (launch.results.empty() || !are_inside) {
    PyErr_SetString(PyExc_ValueError, "a call has no results, or its captures are outside of its words");
    return nullptr;
  }
  launch.captures_pointer = static_cast<std::size_t>(captures_pointer);
  launch.captures_words = static_cast<std::size_t>(captures_words);
  if (places != nullptr && !read_places(places, record->places)) return nullptr;
  record->function = Ref::borrowed(function_of_results);
  launch.owner = Ref::borrowed(owner);
  launch.runtime = Ref::borrowed(runtime);
  launch.function = function, launch.runtime_address = runtime_address, launch.spec = spec;
  launch.as_tuple = as_tuple != 0;
  return keep(front, args, record);
}

PyObject* front_delegate(PyObject* self, PyObject* arguments) {
  PyObject *args = nullptr, *function = nullptr, *places = nullptr;
  if (!PyArg_ParseTuple(arguments, "O!OO!:delegate", &PyTuple_Type, &args, &function, &PyTuple_Type, &places))
    return nullptr;
  const auto record = std::make_shared<Record>();
  record->function = Ref::borrowed(function);
  if (!read_places(places, record->places)) return nullptr;
  return keep(*reinterpret_cast<FrontObject*>(self)->front, args, record);
}

PyObject* front_refuse(PyObject* self, PyObject* args) {
  if (PyTuple_CheckExact(args) == 0) {
    PyErr_SetString(PyExc_TypeError, "give the arguments as a tuple");
    return nullptr;
  }
  const auto record = std::make_shared<Record>();
  record->is_refused = true;
  return keep(*reinterpret_cast<FrontObject*>(self)->front, args, record);
}

PyObject* front_forget(PyObject* self, PyObject*) {
  Front& front = *reinterpret_cast<FrontObject*>(self)->front;
  std::fill(front.seen.begin(), front.seen.end(), 0);
  Records forgotten;
  std::swap(front.records, forgotten);
  return Ref::borrowed(Py_None).release();
}

// --- The type and the module ---

/// The module's; Python's classes that derive from the type have none.
const Host* host_of(PyTypeObject* type) {
  const void* state = PyType_GetModuleState(type);
  for (Ref base; state == nullptr && PyErr_Occurred() != nullptr;) {
    PyErr_Clear();
    base = Ref(PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__base__"));
    type = reinterpret_cast<PyTypeObject*>(base.get());
    if (!base || base.get() == Py_None) return nullptr;
    state = PyType_GetModuleState(type);
  }
  return state == nullptr ? nullptr : &static_cast<const ModuleState*>(state)->host;
}

PyObject* front_new(PyTypeObject* type, PyObject* arguments, PyObject*) {
  const char* kinds = nullptr;
  PyObject *names = nullptr, *defaults = nullptr, *missing = nullptr, *program_of = Py_None;
  Py_ssize_t most = 0;
  int asks_all = 1;
  if (!PyArg_ParseTuple(arguments, "sO!O!On|Op:Front", &kinds, &PyTuple_Type, &names, &PyTuple_Type,
                        &defaults, &missing, &most, &program_of, &asks_all)) {
    return nullptr;
  }
  const std::string_view letters(kinds);
  const auto parameters = static_cast<Py_ssize_t>(letters.size());
  if (letters.size() > kMostParameters || parameters != PyTuple_Size(defaults) ||
      parameters != PyTuple_Size(names) || letters.find_first_not_of("tsmvplcdi") != std::string_view::npos ||
      most < 1) {
    PyErr_SetString(
        PyExc_ValueError,
        "a front's kinds are letters of t, s, m, v, p, l, c, d and i, each with a name and a default");
    return nullptr;
  }
  const auto alloc = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc));
  PyObject* self = alloc(type, 0);
  if (self == nullptr) return nullptr;
  auto* front = new Front;
  front->host = host_of(type);
  front->kinds = kinds;
  front->program_of = Ref::borrowed(program_of);
  front->asks_all = asks_all != 0;
  front->most_records = static_cast<std::size_t>(most);
  front->seen.resize(front->most_records / 4 + 1);
  for (Py_ssize_t i = 0; i < parameters; i++) {
    PyObject* value = PyTuple_GetItem(defaults, i);
    front->names.push_back(Ref::borrowed(PyTuple_GetItem(names, i)));
    front->defaults.push_back(Ref::borrowed(value == missing ? nullptr : value));
  }
  reinterpret_cast<FrontObject*>(self)->front = front;
  reinterpret_cast<FrontObject*>(self)->vectorcall = front_vectorcall;
  return self;
}

int front_traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  const Front* front = reinterpret_cast<FrontObject*>(self)->front;
  if (front == nullptr) return 0;
  Py_VISIT(front->program_of.get());
  for (const auto& [key, record] : front->records) {
    Py_VISIT(record->launch.owner.get());
    Py_VISIT(record->launch.runtime.get());
    Py_VISIT(record->function.get());
    Py_VISIT(record->form.get());
  }
  return 0;
}

int front_clear(PyObject* self) {
  Front* front = reinterpret_cast<FrontObject*>(self)->front;
  if (front != nullptr) {
    Records forgotten;
    std::swap(front->records, forgotten);
  }
  return 0;
}

void front_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  delete reinterpret_cast<FrontObject*>(self)->front;
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

template <class Function>
PyCFunction method(Function* function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef front_methods[] = {
    {"call", method(front_call), METH_FASTCALL | METH_KEYWORDS,
     "call(...): what the call returns, or None where it is to be remembered, or NotImplemented where Python "
     "does it."},
    {"arguments", method(front_arguments), METH_FASTCALL | METH_KEYWORDS,
     "arguments(...): a tuple of one for each parameter, or NotImplemented where they do not fit."},
    {"remember", front_remember, METH_VARARGS,
     "remember(args, owner, runtime, generation, function, runtime_address, spec, device_index, words, "
     "captures_pointer, captures_words, inputs, results, as_tuple, workspace[, function, places]): how calls "
     "like this one are launched, and what function is then given the results and tensors at these places."},
    {"delegate", front_delegate, METH_VARARGS,
     "delegate(args, function, places): gives function None, and of such calls' tensors, lists and captured "
     "tensors the ones at these places, None where one is negative."},
    {"captured", front_captured, METH_O,
     "captured(args): (name, tensor) of what the programs of such a call capture."},
    {"refuse", front_refuse, METH_O, "refuse(args): leaves such calls to Python."},
    {"forget", front_forget, METH_NOARGS, "forget(): all."},
    {nullptr, nullptr, 0, nullptr},
};

PyMemberDef front_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(FrontObject, vectorcall), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyType_Slot front_slots[] = {
    {Py_tp_doc,
     const_cast<char*>("Front(kinds, names, defaults, missing, most, program_of=None, asks_all=True): "
                       "a function's calls, by their arguments. asks_all: whether modes, "
                       "transforms and autocast change what a call gives.")},
    {Py_tp_new, reinterpret_cast<void*>(front_new)},
    {Py_tp_traverse, reinterpret_cast<void*>(front_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(front_clear)},
    {Py_tp_dealloc, reinterpret_cast<void*>(front_dealloc)},
    {Py_tp_methods, front_methods},
    {Py_tp_members, front_members},
    {Py_tp_call, reinterpret_cast<void*>(front_call_itself)},
    {0, nullptr},
};

PyType_Spec front_spec = {"flashjit._front_module.Front", sizeof(FrontObject), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE | kHasVectorcall,
                          front_slots};

int execute(PyObject* module) {
  auto* state = new (PyModule_GetState(module)) ModuleState;
  if (!state->host.open()) return -1;
  const Ref type(PyType_FromModuleAndSpec(module, &front_spec, nullptr));
  state->front_type = reinterpret_cast<PyTypeObject*>(type.get());
  if (!type || PyModule_AddObjectRef(module, "Front", type.get()) != 0) return -1;
  return PyModule_AddIntConstant(module, "INTERFACE", kInterface);
}

void destroy(void* module) {
  if (void* state = PyModule_GetState(static_cast<PyObject*>(module)))
    static_cast<ModuleState*>(state)->~ModuleState();
}

PyMethodDef module_methods[] = {
    {"recorded_forward", method(recorded_forward), METH_FASTCALL,
     "recorded_forward(ctx, call, made, q, k, v, *others): what autograd records. made: (O, LSE), else the "
     "call's forward() is given it."},
    {"recorded_backward", method(recorded_backward), METH_FASTCALL,
     "recorded_backward(ctx, dout, dlse=None): gradients of what recorded_forward() was given behind ctx."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef_Slot module_slots[] = {{Py_mod_exec, reinterpret_cast<void*>(execute)}, {0, nullptr}};

PyModuleDef definition = {PyModuleDef_HEAD_INIT,
                          "_front_module",
                          nullptr,
                          sizeof(ModuleState),
                          module_methods,
                          module_slots,
                          nullptr,
                          nullptr,
                          destroy};

}  // namespace

}  // namespace flashjit::torch

PyMODINIT_FUNC PyInit__front_module() { return PyModuleDef_Init(&flashjit::torch::definition); }
