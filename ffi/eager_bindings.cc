// The Python face of handles and devices, and of all that graph.execute takes.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <optional>
#include <string>

#include "ffi/device_info.h"
#include "ffi/eager_arguments.h"
#include "ffi/eager_programs.h"
#include "ffi/eager_view.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace cudnn_jax {
namespace {

std::string represent(const UserHandle& handle) {
  if (handle.destroyed()) return "<cudnn_jax.Handle, destroyed>";
  return "<cudnn_jax.Handle on device " + std::to_string(handle.device()) + ", stream " +
         std::to_string(number(handle.stream())) + ">";
}

void set_stream(nb::handle handle, nb::handle stream) {
  UserHandle& user = handle_of(handle);
  void* address = stream_of(stream);
  nb::gil_scoped_release release;
  user.set_stream(address);
}

void destroy_handle(nb::handle handle) {
  UserHandle& user = handle_of(handle);
  nb::gil_scoped_release release;
  user.destroy();
}

void bind_handles(nb::module_& m) {
  using Release = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<UserHandle>(
      m, "Handle",
      "A cuDNN handle, the device it is for and the stream it works on. Handles are equal only "
      "to themselves, and no integers: code that needs cuDNN's own asks for backend_handle.")
      .def(
          "__init__",
          [](UserHandle* self, uintptr_t backend, const nb::object& device, const nb::object& stream) {
            const int ordinal = ordinal_of(integer_of(device, "device"));
            const std::optional<void*> on =
                stream.is_none() ? std::nullopt : std::optional<void*>(stream_of(stream));
            nb::gil_scoped_release release;
            new (self) UserHandle(reinterpret_cast<void*>(backend), ordinal, on);
          },
          "backend_handle"_a, "device"_a, "stream"_a = nb::none(),
          nb::sig(
              "def __init__(self, backend_handle: int, device: int, stream: object | None = None) -> None"),
          "Wraps a cuDNN handle made elsewhere; it stays its maker's unless destroy_handle is called. stream "
          "is the "
          "one it works on, asked of cuDNN if absent; another one is a ValueError.")
      .def_prop_ro(
          "backend_handle", [](UserHandle& handle) { return number(handle.backend()); }, Release(),
          "The address of cuDNN's own handle, which is made when it is first asked for.")
      .def_prop_ro("device", &UserHandle::device, "CUDA ordinal.")
      .def_prop_ro(
          "stream", [](const UserHandle& handle) { return number(handle.stream()); }, "A CUstream's address.")
      .def("__repr__", &represent);
  m.def(
      "create_handle",
      [](const nb::object& device, const nb::object& stream) {
        return new UserHandle(ordinal_of(integer_of(device, "device")), stream_of(stream));
      },
      "device"_a = 0, "stream"_a.none() = 0,
      nb::sig("def create_handle(device: int = 0, stream: object = 0) -> Handle"),
      "A handle for a CUDA ordinal and a stream. Opens neither CUDA nor cuDNN yet.");
  m.def("destroy_handle", &destroy_handle, "handle"_a.none(),
        nb::sig("def destroy_handle(handle: Handle) -> None"),
        "Destroys cuDNN's handle, if there is one. A second call does nothing, any other use is a "
        "RuntimeError.");
  m.def(
      "set_stream", &set_stream, "handle"_a.none(), "stream"_a.none(),
      nb::sig("def set_stream(handle: Handle, stream: object) -> None"),
      "Moves the handle to a stream: a CUstream's address, or an object with __cuda_stream__, cuda_stream "
      "(torch) "
      "or ptr (cupy). The stream that it is on already costs nothing. One of another device is a ValueError, "
      "now or when it is first used.");
  m.def(
      "get_stream", [](nb::handle handle) { return number(handle_of(handle).stream()); }, "handle"_a.none(),
      nb::sig("def get_stream(handle: Handle) -> int"), "The address of the handle's stream.");
}

// Devices

void bind_devices(nb::module_& m) {
  nb::class_<DeviceInfo>(m, "DeviceInfo", "Facts of one CUDA device, asked of the driver once.")
      .def_ro("ordinal", &DeviceInfo::ordinal)
      .def_ro("name", &DeviceInfo::name)
      .def_ro("pci_bus_id", &DeviceInfo::pci_bus_id)
      .def_ro("sm", &DeviceInfo::sm, "Compute capability, 90 for 9.0.")
      .def_ro("sm_count", &DeviceInfo::sm_count, "Multiprocessors.")
      .def_ro("shared_memory_per_block", &DeviceInfo::shared_memory_per_block,
              "Bytes, without asking for more.")
      .def_ro("shared_memory_per_block_opt_in", &DeviceInfo::shared_memory_per_block_opt_in,
              "Bytes, at most.")
      .def_ro("l2_bytes", &DeviceInfo::l2_bytes)
      .def_ro("total_memory", &DeviceInfo::total_memory, "Bytes.")
      .def("__repr__", [](const DeviceInfo& info) {
        return "DeviceInfo(ordinal=" + std::to_string(info.ordinal) + ", name='" + info.name +
               "', sm=" + std::to_string(info.sm) + ", sm_count=" + std::to_string(info.sm_count) + ")";
      });
  using Release = nb::call_guard<nb::gil_scoped_release>;
  m.def(
      "device_info",
      [](const nb::object& ordinal) -> const DeviceInfo& {
        const int device = integer_of(ordinal, "device");
        nb::gil_scoped_release release;
        return device_info(device);
      },
      "ordinal"_a = 0, nb::rv_policy::reference, nb::sig("def device_info(ordinal: int = 0) -> DeviceInfo"),
      "The facts of a CUDA device. ValueError for one that is not there, RuntimeError where the driver does "
      "not work.");
  m.def("device_count", &device_count, Release(), "CUDA devices here; 0 without a driver that works.");
}

}  // namespace

void bind_eager(nb::module_& m) {
  bind_handles(m);
  bind_devices(m);
  bind_device_view(m);
  bind_programs(m);
}

}  // namespace cudnn_jax
