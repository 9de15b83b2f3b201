#include "ffi/eager_view.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <utility>

#include "ffi/dtypes.h"
#include "ffi/eager_arguments.h"
#include "ffi/error.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace cudnn_jax {
namespace {

Dims row_major(const Dims& shape) {
  Dims strides(shape.size(), 1);
  for (size_t i = shape.size(); i-- > 1;) strides[i - 1] = strides[i] * shape[i];
  return strides;
}

// What a dtype is called: by itself, or by what numpy, jax, torch and data_type keep its name in.
int xla_dtype_of_python(const nb::object& dtype) {
  std::vector<nb::object> spellings = {dtype};
  for (const char* attribute : {"value", "name", "__name__"}) {
    if (nb::hasattr(dtype, attribute)) spellings.push_back(dtype.attr(attribute));
  }
  const auto whole = nb::cast<std::string>(nb::str(dtype));
  const auto dot = whole.rfind('.');
  spellings.push_back(nb::str(whole.substr(dot == std::string::npos ? 0 : dot + 1).c_str()));
  for (const nb::object& spelling : spellings) {
    if (!nb::isinstance<nb::str>(spelling)) continue;
    const int found = xla_dtype_of(nb::cast<std::string>(spelling));
    if (found >= 0) return found;
  }
  throw Error(ErrorKind::kInvalidArgument, "dtype: got " + nb::cast<std::string>(nb::repr(dtype)) +
                                               ", the rule is one that a program has");
}

// What a capsule holds: the view's own arrays, and a reference to the view.
template <typename Managed>
struct Export {
  Managed managed{};
  nb::object view;
};

template <typename Managed>
void delete_export(Managed* managed) {
  nb::gil_scoped_acquire gil;
  delete static_cast<Export<Managed>*>(managed->context);
}

template <typename Managed>
void delete_unused(PyObject* capsule, const char* name) {
  if (PyCapsule_IsValid(capsule, name) == 0) return;  // a consumer took it
  auto* managed = static_cast<Managed*>(PyCapsule_GetPointer(capsule, name));
  managed->deleter(managed);
}

template <typename Managed>
Export<Managed>* make_export(const nb::object& self, const DeviceView& view) {
  auto* made = new Export<Managed>;
  made->view = self;
  made->managed.tensor = view.tensor();
  made->managed.context = made;
  made->managed.deleter = &delete_export<Managed>;
  return made;
}

nb::object to_capsule(const nb::object& self, const nb::object& stream, const nb::object& max_version,
                      const nb::object& device, const nb::object& copy) {
  // The memory's order on streams is the business of whoever made the view.
  (void)stream;
  const auto& view = nb::cast<const DeviceView&>(self);
  const auto refuse = [](const char* what) {
    PyErr_SetString(PyExc_BufferError, what);
    throw nb::python_error();
  };
  if (!copy.is_none() && nb::cast<bool>(copy)) refuse("copy=True: a DeviceView is never copied");
  if (!device.is_none()) {
    const auto [type, id] =
        nb::cast<std::pair<int, int>>(nb::make_tuple(nb::int_(device[0]), nb::int_(device[1])));
    if (type != view.device().type || id != view.device().id) {
      refuse("dl_device: a DeviceView is never copied to another device");
    }
  }
  if (!max_version.is_none() && nb::cast<uint32_t>(max_version[0]) >= dlpack::kMajor) {
    auto* made = make_export<dlpack::ManagedVersioned>(self, view);
    made->managed.version = {dlpack::kMajor, dlpack::kMinor};
    made->managed.flags = view.read_only() ? dlpack::kReadOnly : 0;
    return nb::steal(PyCapsule_New(&made->managed, "dltensor_versioned", [](PyObject* capsule) {
      delete_unused<dlpack::ManagedVersioned>(capsule, "dltensor_versioned");
    }));
  }
  if (view.read_only()) refuse("a read-only DeviceView needs max_version=(1, 0) or newer, which can say so");
  auto* made = make_export<dlpack::Managed>(self, view);
  return nb::steal(PyCapsule_New(&made->managed, "dltensor", [](PyObject* capsule) {
    delete_unused<dlpack::Managed>(capsule, "dltensor");
  }));
}

// The owner may refer to the view: Python's collector has to see the way.
int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (nb::inst_ready(self)) {
    const nb::handle owner = nb::inst_ptr<DeviceView>(self)->owner();
    Py_VISIT(owner.ptr());
  }
  return 0;
}

int clear(PyObject* self) {
  if (nb::inst_ready(self)) nb::inst_ptr<DeviceView>(self)->owner().reset();
  return 0;
}

PyType_Slot slots[] = {
    {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(clear)},
    {0, nullptr},
};

std::string represent(const DeviceView& view) {
  const auto rank = static_cast<int64_t>(view.shape().size());
  return "DeviceView(" + dtype_name_of(view.xla_dtype()) + describe_dims(view.shape().data(), rank) +
         ", strides " + describe_dims(view.strides().data(), rank) + ", on " + describe(view.device()) + ")";
}

}  // namespace

DeviceView::DeviceView(uintptr_t address, Dims shape, int xla_dtype, std::optional<Dims> strides,
                       std::optional<int> device, bool read_only, nb::object owner)
    : address_(address),
      shape_(std::move(shape)),
      strides_(strides.has_value() ? std::move(*strides) : row_major(shape_)),
      xla_dtype_(xla_dtype),
      device_(device.has_value() ? dlpack::Device{dlpack::kCuda, *device} : dlpack::Device{dlpack::kCpu, 0}),
      read_only_(read_only),
      owner_(std::move(owner)) {
  if (strides_.size() != shape_.size()) {
    throw Error(ErrorKind::kInvalidArgument, "strides: got " + std::to_string(strides_.size()) +
                                                 ", the rule is one for each of the " +
                                                 std::to_string(shape_.size()) + " dimensions");
  }
  for (int64_t dim : shape_) {
    if (dim < 0)
      throw Error(ErrorKind::kInvalidArgument,
                  "shape: got " + std::to_string(dim) + ", the rule is 0 or more");
  }
  if (device.has_value() && *device < 0) {
    throw Error(ErrorKind::kInvalidArgument, "device: got " + std::to_string(*device) +
                                                 ", the rule is a CUDA ordinal, or None for the CPU");
  }
}

void DeviceView::read(BufferView& view) const {
  view.data = reinterpret_cast<void*>(address_);
  view.xla_dtype = xla_dtype_;
  view.device = device_;
  view.rank = static_cast<int64_t>(shape_.size());
  view.shape = shape_.data();
  view.strides = strides_.data();
  view.read_only = read_only_;
}

dlpack::Tensor DeviceView::tensor() const {
  dlpack::Tensor tensor{};
  tensor.data = reinterpret_cast<void*>(address_);
  tensor.device = device_;
  tensor.rank = static_cast<int32_t>(shape_.size());
  tensor.dtype = dlpack_dtype_of(xla_dtype_);
  tensor.shape = const_cast<int64_t*>(shape_.data());
  tensor.strides = const_cast<int64_t*>(strides_.data());
  return tensor;
}

void bind_device_view(nb::module_& m) {
  nb::class_<DeviceView>(
      m, "DeviceView", nb::type_slots(slots),
      "Memory at an address, as a buffer of graph.execute and as a DLPack producer.\n\n"
      "shape and strides count elements; strides are row-major if absent. device is a CUDA "
      "ordinal, or None for the CPU. owner is kept alive as long as the view and every capsule "
      "made of it. Nothing is copied and no stream is waited for.")
      .def(
          "__init__",
          [](DeviceView* self, uintptr_t address, Dims shape, const nb::object& dtype,
             std::optional<Dims> strides, const nb::object& device, nb::object owner, bool read_only) {
            const auto ordinal =
                device.is_none() ? std::nullopt : std::optional<int>(integer_of(device, "device"));
            new (self) DeviceView(address, std::move(shape), xla_dtype_of_python(dtype), std::move(strides),
                                  ordinal, read_only, std::move(owner));
          },
          "address"_a, "shape"_a, "dtype"_a, "strides"_a = nb::none(), "device"_a = nb::none(), nb::kw_only(),
          "owner"_a = nb::none(), "read_only"_a = false,
          nb::sig("def __init__(self, address: int, shape: Sequence[int], dtype: object, strides: "
                  "Sequence[int] | None = None, device: int | None = None, *, owner: object | None = None, "
                  "read_only: bool = False) -> None"))
      .def_prop_ro("address", &DeviceView::address)
      .def_prop_ro(
          "shape", [](const DeviceView& view) { return tuple_of(view.shape()); },
          nb::sig("def shape(self) -> tuple[int, ...]"))
      .def_prop_ro(
          "strides", [](const DeviceView& view) { return tuple_of(view.strides()); },
          nb::sig("def strides(self) -> tuple[int, ...]"), "In elements.")
      .def_prop_ro(
          "dtype", [](const DeviceView& view) { return dtype_name_of(view.xla_dtype()); },
          "numpy's name of it.")
      .def_prop_ro("device",
                   [](const DeviceView& view) -> std::optional<int> {
                     if (view.device().type == dlpack::kCpu) return std::nullopt;
                     return view.device().id;
                   })
      .def_prop_ro("read_only", &DeviceView::read_only)
      .def_prop_ro("owner", [](const DeviceView& view) { return view.owner(); })
      .def(
          "__dlpack_device__",
          [](const DeviceView& view) { return std::make_pair(view.device().type, view.device().id); },
          nb::sig("def __dlpack_device__(self) -> tuple[int, int]"))
      .def("__dlpack__", &to_capsule, nb::kw_only(), "stream"_a = nb::none(), "max_version"_a = nb::none(),
           "dl_device"_a = nb::none(), "copy"_a = nb::none())
      .def("__repr__", &represent);
}

}  // namespace cudnn_jax
