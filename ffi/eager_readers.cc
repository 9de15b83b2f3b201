#include "ffi/eager_readers.h"

#include <nanobind/stl/string.h>

#include <charconv>
#include <string>
#include <system_error>

#include "ffi/driver.h"
#include "ffi/dtypes.h"
#include "ffi/eager_view.h"
#include "ffi/error.h"
#include "ffi/streams.h"

namespace nb = nanobind;

namespace cudnn_jax {
namespace {

constexpr char kUnversioned[] = "dltensor";
constexpr char kVersioned[] = "dltensor_versioned";
constexpr int64_t kMaxItemsize = 16;

std::string type_name(PyObject* object) {
  return nb::cast<std::string>(nb::handle(reinterpret_cast<PyObject*>(Py_TYPE(object))).attr("__qualname__"));
}

// "BufferError: the text", on one line, and the exception is no longer set. An interrupt goes on.
std::string take_python_error() {
  if (PyErr_Occurred() == nullptr) return "no reason given";
  nb::python_error error;
  if (!error.matches(PyExc_Exception)) throw error;
  std::string text = nb::cast<std::string>(error.type().attr("__name__")) + ": " +
                     nb::cast<std::string>(nb::str(error.value()));
  for (char& c : text) c = c == '\n' ? ' ' : c;
  return text;
}

[[noreturn]] void refuse(const std::string& label, const std::string& what) {
  throw Error(ErrorKind::kInvalidArgument, label + ": " + what);
}

// Interned once, as the interpreter lives as long as the module.
struct Names {
  PyObject* dlpack = PyUnicode_InternFromString("__dlpack__");
  PyObject* max_version = Py_BuildValue("(II)", dlpack::kMajor, dlpack::kMinor);
  PyObject* version_and_stream = Py_BuildValue("(ss)", "max_version", "stream");
  PyObject* version = Py_BuildValue("(s)", "max_version");
  PyObject* stream = Py_BuildValue("(s)", "stream");
};

const Names& names() {
  static const Names instance;
  return instance;
}

// The type's table, or an older one that it keeps for our major version.
const dlpack::Exchange* exchange_of(PyTypeObject* type) {
  PyObject* capsule = PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__");
  if (capsule == nullptr) {
    PyErr_Clear();
    return nullptr;
  }
  auto* header = static_cast<dlpack::ExchangeHeader*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
  Py_DECREF(capsule);
  if (header == nullptr) PyErr_Clear();
  while (header != nullptr && header->version.major != dlpack::kMajor) header = header->previous;
  return reinterpret_cast<const dlpack::Exchange*>(header);
}

bool has(PyTypeObject* type, const char* name) {
  return PyObject_HasAttrString(reinterpret_cast<PyObject*>(type), name) == 1;
}

// The bytes of an element, behind the byte order and the kind; 0 if it is no such number.
int64_t itemsize_of(const std::string& typestr) {
  int64_t bytes = 0;
  const char* end = typestr.data() + typestr.size();
  const auto read = std::from_chars(typestr.data() + 2, end, bytes);
  return read.ec == std::errc() && read.ptr == end && bytes <= kMaxItemsize ? bytes : 0;
}

bool is_jax_array(PyTypeObject* type) {
  const nb::handle self = reinterpret_cast<PyObject*>(type);
  const auto module = nb::cast<std::string>(nb::str(self.attr("__module__")));
  return (module.rfind("jax.", 0) == 0 || module.rfind("jaxlib.", 0) == 0) && has(type, "__dlpack__");
}

}  // namespace

Held::~Held() {
  while (count_ > 0) {
    const Item& item = items_[--count_];
    switch (item.kind) {
      case Kind::kObject: Py_DECREF(static_cast<PyObject*>(item.what)); break;
      case Kind::kManaged: {
        auto* managed = static_cast<dlpack::Managed*>(item.what);
        if (managed->deleter != nullptr) managed->deleter(managed);
        break;
      }
      case Kind::kVersioned: {
        auto* managed = static_cast<dlpack::ManagedVersioned*>(item.what);
        if (managed->deleter != nullptr) managed->deleter(managed);
        break;
      }
    }
  }
}

void Held::object(PyObject* object) {
  Py_INCREF(object);
  add(Kind::kObject, object);
}

struct BufferReader::TypeEntry {
  enum class Protocol { kView, kAddress, kExchange, kCapsule, kInterface };
  PyTypeObject* type = nullptr;  // a reference, so that no other type gets the address
  Protocol protocol = Protocol::kInterface;
  const dlpack::Exchange* exchange = nullptr;
  bool immutable = false;
  bool takes_version = true;  // __dlpack__(max_version=), until it refuses
};

// A few types are met again and again; a program that makes types without end must not fill memory. Read and
// written with the GIL held, and by value: other threads may fill a slot anew whenever Python runs.
BufferReader::TypeEntry BufferReader::entry_of(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  for (const TypeEntry& entry : cached()) {
    if (entry.type == type) return entry;
  }
  TypeEntry made;
  made.type = type;
  if (PyType_IsSubtype(type, reinterpret_cast<PyTypeObject*>(nb::type<DeviceView>().ptr()))) {
    made.protocol = TypeEntry::Protocol::kView;
  } else if (type == &PyLong_Type) {
    made.protocol = TypeEntry::Protocol::kAddress;
  } else if ((made.exchange = exchange_of(type)) != nullptr) {
    made.protocol = TypeEntry::Protocol::kExchange;
  } else if (has(type, "__dlpack__")) {
    made.protocol = TypeEntry::Protocol::kCapsule;
    made.immutable = is_jax_array(type);
  }
  remember(made);
  return made;
}

std::array<BufferReader::TypeEntry, 16>& BufferReader::cached() {
  static std::array<TypeEntry, 16> entries;
  return entries;
}

void BufferReader::remember(const TypeEntry& entry) {
  static size_t next = 0;
  for (TypeEntry& known : cached()) {
    if (known.type == entry.type) {
      known = entry;
      return;
    }
  }
  TypeEntry& slot = cached()[next];
  next = (next + 1) % cached().size();
  PyTypeObject* old = slot.type;
  Py_INCREF(reinterpret_cast<PyObject*>(entry.type));
  slot = entry;
  Py_XDECREF(reinterpret_cast<PyObject*>(old));
}

void BufferReader::read(PyObject* object, const std::string& label, BufferView& view) {
  held_.object(object);
  const TypeEntry entry = entry_of(object);
  view.immutable = entry.immutable;
  view.address = false;
  view.read_only = false;
  switch (entry.protocol) {
    case TypeEntry::Protocol::kView:
      if (!nb::inst_ready(object)) {
        throw nb::type_error((label + ": got a DeviceView whose __init__ never ran").c_str());
      }
      nb::inst_ptr<DeviceView>(object)->read(view);
      return;
    case TypeEntry::Protocol::kAddress:
      view.data = reinterpret_cast<void*>(PyLong_AsSize_t(object));  // refuses what is negative
      view.address = true;
      if (PyErr_Occurred() != nullptr) refuse(label, "the address does not fit: " + take_python_error());
      return;
    case TypeEntry::Protocol::kExchange: by_exchange(object, *entry.exchange, label, view); return;
    case TypeEntry::Protocol::kCapsule: by_capsule(object, entry, label, view); return;
    case TypeEntry::Protocol::kInterface: break;
  }
  if (by_interface(object, label, view)) return;
  const std::string what =
      label + ": got a " + type_name(object) +
      ", the rule is a DLPack producer, an object with __cuda_array_interface__ or (on the "
      "CPU) __array_interface__, a DeviceView, or an address as an int";
  throw nb::type_error(what.c_str());
}

void BufferReader::by_exchange(PyObject* object, const dlpack::Exchange& exchange, const std::string& label,
                               BufferView& view) {
  if (exchange.tensor_from_object != nullptr) {
    dlpack::Tensor tensor;
    if (exchange.tensor_from_object(object, &tensor) != 0) refuse(label, take_python_error());
    view.set(tensor, 0, label);
  } else {
    dlpack::ManagedVersioned* managed = nullptr;
    if (exchange.managed_from_object(object, &managed) != 0) refuse(label, take_python_error());
    held_.managed(managed);
    view.set(managed->tensor, managed->flags, label);
  }
  if (on_cuda() && ordered_ != &exchange && place_.takes(view.device)) {
    void* stream = nullptr;
    if (exchange.current_stream(dlpack::kCuda, place_.device, &stream) != 0) {
      refuse(label, "its library does not tell its stream: " + take_python_error());
    }
    wait_for(stream);
    ordered_ = &exchange;
  }
}

PyObject* BufferReader::call_dlpack(PyObject* object, const TypeEntry& entry) {
  PyObject* arguments[3] = {object};
  size_t count = 1;
  PyObject* keywords = nullptr;
  if (entry.takes_version) {
    arguments[count++] = names().max_version;
    keywords = names().version;
  }
  if (on_cuda()) {
    if (!stream_.is_valid()) {
      // 0 is ambiguous in DLPack: the legacy default stream is 1 there.
      const auto address = reinterpret_cast<uintptr_t>(place_.stream);
      stream_ = nb::int_(address == 0 ? 1 : address);
    }
    arguments[count++] = stream_.ptr();
    keywords = entry.takes_version ? names().version_and_stream : names().stream;
  }
  return PyObject_VectorcallMethod(names().dlpack, arguments, 1, keywords);
}

void BufferReader::by_capsule(PyObject* object, TypeEntry entry, const std::string& label, BufferView& view) {
  PyObject* capsule = call_dlpack(object, entry);
  if (capsule == nullptr && entry.takes_version && PyErr_ExceptionMatches(PyExc_TypeError)) {
    // A producer from before DLPack 1 knows no max_version.
    PyErr_Clear();
    entry.takes_version = false;
    capsule = call_dlpack(object, entry);
    if (capsule != nullptr) remember(entry);
  }
  if (capsule != nullptr) {
    const nb::object owner = nb::steal(capsule);
    take_capsule(capsule, label, view);
    return;
  }
  const std::string reason = take_python_error();
  // On another device the producer may have refused because of the stream: tell of the device.
  const nb::object device = nb::steal(PyObject_CallMethod(object, "__dlpack_device__", nullptr));
  if (!device.is_valid()) {
    PyErr_Clear();
  } else {
    dlpack::Device found{};
    if (PyArg_ParseTuple(device.ptr(), "ii", &found.type, &found.id) == 0) {
      PyErr_Clear();
    } else if (!place_.takes(found)) {
      refuse(label, "the graph runs on " + place_.describe() + ", the buffer is on " + describe(found));
    }
  }
  if (!by_interface(object, label, view))
    refuse(label, "__dlpack__ of " + type_name(object) + " failed: " + reason);
}

void BufferReader::take_capsule(PyObject* capsule, const std::string& label, BufferView& view) {
  if (PyCapsule_IsValid(capsule, kVersioned) == 1) {
    auto* managed = static_cast<dlpack::ManagedVersioned*>(PyCapsule_GetPointer(capsule, kVersioned));
    PyCapsule_SetName(capsule, "used_dltensor_versioned");
    held_.managed(managed);
    if (managed->version.major != dlpack::kMajor) {
      refuse(label, "the buffer comes by DLPack " + std::to_string(managed->version.major) + "." +
                        std::to_string(managed->version.minor) + ", the rule is version 1");
    }
    view.set(managed->tensor, managed->flags, label);
  } else if (PyCapsule_IsValid(capsule, kUnversioned) == 1) {
    auto* managed = static_cast<dlpack::Managed*>(PyCapsule_GetPointer(capsule, kUnversioned));
    PyCapsule_SetName(capsule, "used_dltensor");
    held_.managed(managed);
    view.set(managed->tensor, 0, label);
  } else {
    refuse(label, "__dlpack__ gave no capsule named \"dltensor\" or \"dltensor_versioned\"");
  }
}

void BufferReader::wait_for(void* stream) {
  if (same_stream(stream, place_.stream)) return;
  ContextScope scope(place_.stream, place_.device);
  order_after(place_.stream, stream);
}

// The dictionary of either array interface. False when the object has none.
bool BufferReader::by_interface(PyObject* object, const std::string& label, BufferView& view) {
  const char* name = on_cuda() ? "__cuda_array_interface__" : "__array_interface__";
  const nb::object interface = nb::steal(PyObject_GetAttrString(object, name));
  if (!interface.is_valid()) {
    PyErr_Clear();
    return false;
  }
  if (!nb::isinstance<nb::dict>(interface)) refuse(label, std::string(name) + " is no dict");
  const auto get = [&interface](const char* key) {
    PyObject* found = PyDict_GetItemString(interface.ptr(), key);
    return nb::borrow(found == nullptr ? Py_None : found);
  };

  try {
    const auto typestr = nb::cast<std::string>(get("typestr"));
    if (typestr.size() < 3 || typestr[0] == '>') refuse(label, "its element type is " + typestr);
    const int64_t itemsize = itemsize_of(typestr);
    if (itemsize <= 0) refuse(label, "its element type is " + typestr + ", the rule is 1 to 16 bytes");
    view.xla_dtype = xla_dtype_of(typestr[1], itemsize);
    if (view.xla_dtype < 0 && PyObject_HasAttrString(object, "dtype") == 1) {
      // Types that numpy does not know are opaque bytes there, with a name in ml_dtypes.
      const nb::handle self = object;
      view.xla_dtype = xla_dtype_of(nb::cast<std::string>(nb::str(self.attr("dtype").attr("name"))));
      if (8 * itemsize != dlpack_dtype_of(view.xla_dtype).bits) view.xla_dtype = -1;
    }
    if (view.xla_dtype < 0) refuse(label, "its element type is " + typestr + ", which no program has");

    const nb::object data = get("data");
    if (!nb::isinstance<nb::tuple>(data)) refuse(label, std::string(name) + " holds no address");
    view.data = reinterpret_cast<void*>(nb::cast<uintptr_t>(data[0]));
    view.read_only = nb::cast<bool>(data[1]);
    if (!get("mask").is_none()) refuse(label, "it has a mask, the rule is an array without one");
    const nb::object shape = get("shape");
    const nb::object strides = get("strides");
    view.rank = static_cast<int64_t>(nb::len(shape));
    if (view.rank > kMaxViewRank) {
      refuse(label, "it has " + std::to_string(view.rank) + " dimensions, the rule is at most " +
                        std::to_string(kMaxViewRank));
    }
    if (!strides.is_none() && static_cast<int64_t>(nb::len(strides)) != view.rank) {
      refuse(label, std::string(name) + " has " + std::to_string(nb::len(strides)) +
                        " strides, the rule is " + std::to_string(view.rank) + ", as many as dimensions");
    }
    view.shape = view.storage.data();
    view.strides = strides.is_none() ? nullptr : view.storage.data() + kMaxViewRank;
    for (int64_t i = 0; i < view.rank; ++i) {
      view.storage[i] = nb::cast<int64_t>(shape[i]);
      if (view.storage[i] < 0) {
        refuse(label, "its shape has " + std::to_string(view.storage[i]) + ", the rule is 0 or more");
      }
      if (strides.is_none()) continue;
      const auto bytes = nb::cast<int64_t>(strides[i]);
      if (bytes % itemsize != 0) refuse(label, "its strides are no multiples of its elements");
      view.storage[kMaxViewRank + i] = bytes / itemsize;
    }
    view.device = {dlpack::kCpu, 0};
    if (on_cuda()) {
      const int ordinal = view.data == nullptr ? place_.device : device_of_address(view.data);
      if (ordinal >= 0) view.device = {dlpack::kCuda, ordinal};
      const nb::object stream = get("stream");
      if (!stream.is_none()) wait_for(reinterpret_cast<void*>(nb::cast<uintptr_t>(stream)));
    }
  } catch (const nb::cast_error&) {
    refuse(label, std::string(name) + " breaks its protocol");
  } catch (nb::python_error& error) {
    error.restore();
    refuse(label, std::string(name) + " breaks its protocol: " + take_python_error());
  }
  return true;
}

}  // namespace cudnn_jax
