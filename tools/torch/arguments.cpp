#include <algorithm>
#include <cstring>

#include "front.hpp"

namespace flashjit::torch {

namespace {

constexpr int kMostDims = 8;

int alignment_of(uint64_t address) {
  return address == 0 ? 16 : static_cast<int>(std::min<uint64_t>(address & (~address + 1), 16));
}

bool add_layout(Key& key, const Tensor& tensor, int alignment) {
  const bool is_long = key.count + 3 + 2 * static_cast<std::size_t>(tensor.rank) > key.words.size();
  if (tensor.rank < 0 || tensor.rank > kMostDims || is_long) return false;
  uint64_t type = 0;
  std::memcpy(&type, &tensor.type, sizeof tensor.type);
  key.add(uint64_t{1} << 32 | type);
  key.add(static_cast<uint64_t>(tensor.device.type) << 32 | static_cast<uint32_t>(tensor.device.index));
  key.add(static_cast<uint64_t>(alignment) << 32 | static_cast<uint64_t>(tensor.rank));
  for (int i = 0; i < tensor.rank; i++) {
    key.add(static_cast<uint64_t>(tensor.size[i]));
    key.add(static_cast<uint64_t>(tensor.stride[i]));
  }
  return true;
}

bool has_elements(const Tensor& tensor) {
  return std::all_of(tensor.size, tensor.size + tensor.rank, [](int64_t size) { return size > 0; });
}

/// A tensor's layout to the key. wants_grad: set where autograd has to record the call.
bool add_tensor(const Host& host, PyObject* object, const Mood& mood, Key& key, uint64_t& data,
                bool& wants_grad, bool may_be_negated = true) {
  if (object == Py_None) return key.add(0);
  Tensor tensor;
  if (!host.is_tensor(object) || !host.read(object, tensor)) return false;
  if (tensor.device.type != kCpu && tensor.device.type != kCuda) return false;
  data = reinterpret_cast<uint64_t>(tensor.data) + tensor.byte_offset;
  if (tensor.data == nullptr && has_elements(tensor)) return false;  // its storage was freed
  const bool is_whole =
      tensor.type.code == kSigned || tensor.type.code == kUnsigned || tensor.type.code == kBool;
  if (!is_whole && may_be_negated && host.is_negated(object)) return false;
  if (!is_whole && mood.records && host.requires_grad(object)) wants_grad = true;
  return add_layout(key, tensor, alignment_of(data));
}

bool add_text(Key& key, PyObject* text) {
  Py_ssize_t size = 0;
  const char* letters = PyUnicode_AsUTF8AndSize(text, &size);
  if (letters == nullptr) {
    PyErr_Clear();
    return false;
  }
  if (!key.add(uint64_t{6} << 32 | static_cast<uint64_t>(size))) return false;
  for (Py_ssize_t at = 0; at < size; at += 8) {
    uint64_t word = 0;
    std::memcpy(&word, letters + at, static_cast<std::size_t>(std::min<Py_ssize_t>(8, size - at)));
    if (!key.add(word)) return false;
  }
  return true;
}

bool add_value(Key& key, PyObject* value) {
  if (value == Py_None) return key.add(0);
  if (value == Py_False || value == Py_True) return key.add(uint64_t{2} << 32 | (value == Py_True));
  if (PyLong_CheckExact(value)) {
    int overflow = 0;
    const long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
    return overflow == 0 && key.add(uint64_t{3} << 32) && key.add(static_cast<uint64_t>(number));
  }
  if (PyFloat_CheckExact(value)) {
    const double number = PyFloat_AsDouble(value);
    uint64_t bits = 0;
    std::memcpy(&bits, &number, sizeof bits);
    return key.add(uint64_t{4} << 32) && key.add(bits);
  }
  if (const bool is_tuple = PyTuple_CheckExact(value); is_tuple || PyList_CheckExact(value)) {
    const Py_ssize_t size = is_tuple ? PyTuple_Size(value) : PyList_Size(value);
    if (size > 8 || !key.add((is_tuple ? uint64_t{5} : uint64_t{7}) << 32 | static_cast<uint64_t>(size)))
      return false;
    for (Py_ssize_t i = 0; i < size; i++) {
      PyObject* part = is_tuple ? PyTuple_GetItem(value, i) : PyList_GetItem(value, i);
      if (PyTuple_CheckExact(part) || PyList_CheckExact(part) || !add_value(key, part)) return false;
    }
    return true;
  }
  return PyUnicode_CheckExact(value) && add_text(key, value);
}

/// Adds lists to the key: their maker gives numbers for it after the address of their handle.
bool add_lists(Key& key, PyObject* lists, uint64_t& data) {
  if (lists == Py_None) return key.add(0);
  const Ref told(PyObject_GetAttrString(lists, "front_key"));
  if (!told || PyTuple_CheckExact(told.get()) == 0) {
    PyErr_Clear();
    return false;
  }
  const Py_ssize_t count = PyTuple_Size(told.get());
  bool added = count > 0 && key.add(uint64_t{10} << 32 | static_cast<uint64_t>(count));
  for (Py_ssize_t i = 0; added && i < count; i++) {
    PyObject* number = PyTuple_GetItem(told.get(), i);
    if (PyLong_CheckExact(number) == 0) return false;
    const uint64_t word = PyLong_AsUnsignedLongLongMask(number);
    if (i == 0)
      data = word;
    else
      added = key.add(word);
  }
  return added;
}

bool is_number(PyObject* value) {
  return value == Py_False || value == Py_True || PyLong_CheckExact(value) || PyFloat_CheckExact(value);
}

/// A name's tensor to the key and to what is captured, or its number to the key.
bool add_capture(const Front& front, PyObject* name, PyObject* value, const Mood& mood, Arguments& found,
                 bool& wants_grad) {
  if (is_number(value)) return add_value(found.key, value);
  if (found.captured_count == kMostCaptured || value == Py_None) return false;
  bool has_grad = false;
  uint64_t& data = found.data[front.kinds.size() + found.captured_count];
  const std::size_t layout = found.key.count;
  if (!add_tensor(*front.host, value, mood, found.key, data, has_grad)) return false;
  const auto rank = static_cast<uint32_t>(found.key.words[layout + 2]);
  const uint64_t device_type = found.key.words[layout + 1] >> 32;
  if (rank == 0 && device_type == kCpu) return false;  // a number, which each call reads
  found.names[found.captured_count] = name;
  found.captured[found.captured_count++] = value;
  wants_grad = wants_grad || has_grad;
  return found.key.add(has_grad);  // which decides the spec
}

/// The values of the names in texts.
bool add_captures(const Front& front, PyObject* captures, const Mood& mood, Arguments& found,
                  bool& wants_grad) {
  if (captures == Py_None) return found.key.add(0);
  if (!PyDict_CheckExact(captures)) return false;
  if (!found.key.add(uint64_t{8} << 32 | static_cast<uint64_t>(PyDict_Size(captures)))) return false;
  Py_ssize_t at = 0;
  PyObject *name = nullptr, *value = nullptr;
  while (PyDict_Next(captures, &at, &name, &value) != 0) {
    if (!PyUnicode_CheckExact(name) || !add_text(found.key, name)) return false;
    if (!add_capture(front, name, value, mood, found, wants_grad)) return false;
  }
  return true;
}

/// Programs that are no texts, by what Python finds them to be.
Reading add_programs(const Front& front, PyObject* const* args, const Mood& mood, Arguments& found,
                     bool& wants_grad) {
  Ref given(PyTuple_New(std::count(front.kinds.begin(), front.kinds.end(), kProgram)));
  if (!given) return Reading::failed;
  Py_ssize_t at = 0;
  for (std::size_t i = 0; i < front.kinds.size(); i++) {
    if (front.kinds[i] == kCaptures && args[i] != Py_None) return Reading::not_plain;
    if (front.kinds[i] == kProgram) PyTuple_SetItem(given.get(), at++, Ref::borrowed(args[i]).release());
  }
  found.program = Ref(PyObject_CallObject(front.program_of.get(), given.get()));
  if (!found.program) return Reading::failed;
  if (found.program.get() == Py_None) return Reading::not_plain;
  PyObject *form = nullptr, *names = nullptr, *tensors = nullptr, *scalars = nullptr;
  if (!PyArg_ParseTuple(found.program.get(), "OO!O!O!", &form, &PyTuple_Type, &names, &PyTuple_Type, &tensors,
                        &PyTuple_Type, &scalars)) {
    return Reading::failed;
  }
  const Py_ssize_t count = PyTuple_Size(tensors);
  if (PyTuple_Size(names) < count || !found.key.add(reinterpret_cast<uint64_t>(form)))
    return Reading::not_plain;
  for (Py_ssize_t i = 0; i < count; i++) {
    PyObject* tensor = PyTuple_GetItem(tensors, i);
    if (is_number(tensor)) return Reading::not_plain;
    if (!add_capture(front, PyTuple_GetItem(names, i), tensor, mood, found, wants_grad))
      return Reading::not_plain;
  }
  for (Py_ssize_t i = 0; i < PyTuple_Size(scalars); i++) {
    PyObject* number = PyTuple_GetItem(scalars, i);
    if (!is_number(number) || !add_value(found.key, number)) return Reading::not_plain;
  }
  return Reading::done;
}

std::size_t parameter_of(const Front& front, PyObject* name) {
  const std::size_t count = front.names.size();
  for (std::size_t i = 0; i < count; i++) {
    if (front.names[i].get() == name) return i;  // both are interned, mostly
  }
  for (std::size_t i = 0; i < count; i++) {
    if (PyUnicode_Compare(front.names[i].get(), name) == 0) return i;
  }
  return count;
}

bool fill_defaults(const Front& front, std::size_t first, Given& given) {
  for (std::size_t i = first; i < front.kinds.size(); i++) {
    if (given[i] == nullptr) given[i] = front.defaults[i].get();
    if (given[i] == nullptr) return false;
  }
  return true;
}

}  // namespace

Reading read_arguments(const Front& front, PyObject* const* args, Arguments& found) {
  for (std::size_t i = 0; i < front.kinds.size(); i++) {  // first, because it takes the least time
    if (front.kinds[i] == kDefault && args[i] != front.defaults[i].get()) return Reading::not_plain;
  }
  Mood mood;
  if (!front.host->mood(front.asks_all, mood)) return Reading::failed;
  if (!mood.is_plain) return Reading::not_plain;
  Key& key = found.key;
  key.add(0);  // set at the end
  bool wants_grad = false, has_programs = false;
  for (std::size_t i = 0; i < front.kinds.size(); i++) {
    bool added = true;
    const char kind = front.kinds[i];
    if (kind == kTensor || kind == kMemory || kind == kSaved) {
      added = add_tensor(*front.host, args[i], mood, key, found.data[i], wants_grad, kind != kSaved);
    } else if (kind == kProgram && args[i] != Py_None && !PyUnicode_CheckExact(args[i])) {
      has_programs = true;
      added = key.add(uint64_t{9} << 32);
    } else if (kind == kValue || kind == kProgram) {
      added = add_value(key, args[i]);
    } else if (kind == kLists) {
      added = add_lists(key, args[i], found.data[i]);
    } else if (kind == kCaptures) {
      added = add_captures(front, args[i], mood, found, wants_grad);
    }
    if (!added) return Reading::not_plain;
  }
  if (has_programs) {
    const Reading reading = add_programs(front, args, mood, found, wants_grad);
    if (reading != Reading::done) return reading;
  }
  key.words[0] = static_cast<uint64_t>(wants_grad) << 1 | static_cast<uint64_t>(mood.deterministic);
  return Reading::done;
}

bool place_arguments(const Front& front, PyObject* const* args, Py_ssize_t count, PyObject* names,
                     Given& given) {
  const std::size_t parameters = front.kinds.size(), positional = static_cast<std::size_t>(count);
  if (positional > parameters) return false;
  std::copy(args, args + count, given.begin());
  std::fill(given.begin() + count, given.begin() + static_cast<std::ptrdiff_t>(parameters), nullptr);
  const Py_ssize_t named = names == nullptr ? 0 : PyTuple_Size(names);
  for (Py_ssize_t i = 0; i < named; i++) {
    const std::size_t at = parameter_of(front, PyTuple_GetItem(names, i));
    if (at == parameters || given[at] != nullptr) return false;
    given[at] = args[count + i];
  }
  return fill_defaults(front, positional, given);
}

bool place_arguments(const Front& front, PyObject* args, PyObject* named, Given& given) {
  const std::size_t parameters = front.kinds.size(),
                    positional = static_cast<std::size_t>(PyTuple_Size(args));
  if (positional > parameters) return false;
  std::fill_n(given.begin(), parameters, nullptr);
  for (std::size_t i = 0; i < positional; i++) given[i] = PyTuple_GetItem(args, static_cast<Py_ssize_t>(i));
  Py_ssize_t place = 0;
  PyObject *name = nullptr, *value = nullptr;
  while (named != nullptr && PyDict_Next(named, &place, &name, &value) != 0) {
    const std::size_t at = parameter_of(front, name);
    if (at == parameters || given[at] != nullptr) return false;
    given[at] = value;
  }
  return fill_defaults(front, positional, given);
}

}  // namespace flashjit::torch
