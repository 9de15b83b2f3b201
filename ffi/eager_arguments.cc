#include "ffi/eager_arguments.h"

#include <nanobind/stl/string.h>

#include <string>

#include "ffi/error.h"
#include "ffi/per_device.h"

namespace nb = nanobind;

namespace cudnn_jax {
namespace {

std::string show_python(nb::handle value) {
  return nb::cast<std::string>(nb::str(value.type().attr("__name__"))) + " " +
         nb::cast<std::string>(nb::repr(value));
}

}  // namespace

UserHandle& handle_of(nb::handle value) {
  if (nb::isinstance<UserHandle>(value)) {
    if (nb::inst_ready(value)) return *nb::inst_ptr<UserHandle>(value);
    throw nb::type_error("handle: got a cudnn_jax.Handle whose __init__ never ran");
  }
  const std::string what = "handle: got " + show_python(value) +
                           ", the rule is a cudnn_jax.Handle, as cudnn_jax.create_handle() makes it";
  throw nb::type_error(what.c_str());
}

// A stream's address: the number itself, or what the CUDA stream protocol, torch or cupy keep it in.
void* stream_of(nb::handle stream) {
  nb::object address;
  if (nb::isinstance<nb::int_>(stream) && !PyBool_Check(stream.ptr())) {
    address = nb::borrow(stream);
  } else if (nb::hasattr(stream, "__cuda_stream__")) {
    const nb::object told = stream.attr("__cuda_stream__")();
    if (nb::cast<int>(told[0]) != 0) {
      throw Error(
          ErrorKind::kInvalidArgument,
          "stream: its protocol is version " + std::to_string(nb::cast<int>(told[0])) + ", the rule is 0");
    }
    address = told[1];
  } else if (nb::hasattr(stream, "cuda_stream")) {
    address = stream.attr("cuda_stream");
  } else if (nb::hasattr(stream, "ptr")) {
    address = stream.attr("ptr");
  }
  uintptr_t value = 0;
  if (!address.is_valid() || !nb::try_cast(address, value)) {
    const std::string what =
        "stream: got " + show_python(stream) +
        ", the rule is a CUstream's address, or an object with __cuda_stream__, cuda_stream "
        "(torch) or ptr (cupy)";
    throw nb::type_error(what.c_str());
  }
  return reinterpret_cast<void*>(value);
}

int integer_of(nb::handle value, const char* name) {
  int number = 0;
  if (PyIndex_Check(value.ptr()) && !PyBool_Check(value.ptr()) && nb::try_cast(value, number)) return number;
  const std::string what = std::string(name) + ": got " + show_python(value) + ", the rule is an integer";
  throw nb::type_error(what.c_str());
}

int ordinal_of(int device) {
  if (device < 0 || device >= kMaxDevices) {
    throw Error(ErrorKind::kInvalidArgument, "device: got " + std::to_string(device) +
                                                 ", the rule is a CUDA ordinal, 0 to " +
                                                 std::to_string(kMaxDevices - 1));
  }
  return device;
}

nb::tuple tuple_of(const Dims& dims) {
  nb::list list;
  for (int64_t dim : dims) list.append(dim);
  return nb::tuple(list);
}

}  // namespace cudnn_jax
