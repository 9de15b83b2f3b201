// The Python face of graph.execute: the operands of a graph, and its program run on buffers of the caller in
// one crossing.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ffi/counters.h"
#include "ffi/device_info.h"
#include "ffi/driver.h"
#include "ffi/dtypes.h"
#include "ffi/eager_arguments.h"
#include "ffi/eager_operands.h"
#include "ffi/eager_programs.h"
#include "ffi/eager_readers.h"
#include "ffi/error.h"
#include "ffi/program.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace cudnn_jax {
namespace {

// The buffers of a call for readers, by rising uid.
class VariantPack {
 public:
  struct Operand {
    int64_t uid;
    uintptr_t pointer;
    Dims shape;
    Dims stride;
    std::string dtype;
    bool output;
  };

  VariantPack(const GraphOperands& graph, nb::handle buffers, const Place& place) {
    BufferReader reader(place, held_);
    operands_.resize(graph.all().size());
    graph.read(buffers, place, reader, [&](size_t slot, const BufferView& view) {
      GraphOperand operand = graph.all()[slot].as_given(view);
      operands_[slot] = {operand.uid,
                         number(view.data),
                         std::move(operand.shape),
                         std::move(operand.strides),
                         dtype_name_of(operand.xla_dtype),
                         operand.output};
    });
    std::sort(operands_.begin(), operands_.end(),
              [](const Operand& a, const Operand& b) { return a.uid < b.uid; });
  }

  const std::vector<Operand>& operands() const { return operands_; }

  size_t index_of(int64_t uid) const {
    for (size_t i = 0; i < operands_.size(); ++i) {
      if (operands_[i].uid == uid) return i;
    }
    throw Error(ErrorKind::kInvalidArgument, "uid: got " + std::to_string(uid) + ", which the pack lacks");
  }

 private:
  Held held_;
  std::vector<Operand> operands_;
};

Place place_of(std::optional<int> device, nb::handle stream) {
  if (!device.has_value()) return {};
  return {Platform::kCuda, ordinal_of(*device), stream_of(stream)};
}

GraphOperands* make_operands(const nb::list& rows, bool any_strides) {
  auto made = std::make_unique<GraphOperands>(any_strides);
  for (nb::handle row : rows) {
    GraphOperand operand;
    operand.label = nb::cast<std::string>(row[1]);
    operand.uid = nb::cast<int64_t>(row[2]);
    operand.xla_dtype = xla_dtype_of(nb::cast<std::string>(row[3]));
    operand.shape = nb::cast<Dims>(row[4]);
    operand.strides = nb::cast<Dims>(row[5]);
    operand.output = nb::cast<bool>(row[6]);
    made->add(nb::object(row[0]).ptr(), std::move(operand));
  }
  return made.release();
}

void bind_packs(nb::module_& m) {
  nb::class_<VariantPack::Operand>(m, "PackOperand", "One buffer of a VariantPack.")
      .def_ro("uid", &VariantPack::Operand::uid)
      .def_ro("pointer", &VariantPack::Operand::pointer, "Address of the first element.")
      .def_prop_ro(
          "shape", [](const VariantPack::Operand& o) { return tuple_of(o.shape); },
          nb::sig("def shape(self) -> tuple[int, ...]"))
      .def_prop_ro(
          "stride", [](const VariantPack::Operand& o) { return tuple_of(o.stride); },
          nb::sig("def stride(self) -> tuple[int, ...]"), "In elements.")
      .def_ro("dtype", &VariantPack::Operand::dtype, "numpy's name of it.")
      .def_ro("output", &VariantPack::Operand::output);
  nb::class_<VariantPack>(
      m, "VariantPack",
      "The buffers of one call, read and checked, by rising uid, each with its own strides. Keeps "
      "them alive.")
      .def_prop_ro(
          "uids",
          [](const VariantPack& self) {
            Dims uids;
            for (const auto& operand : self.operands()) uids.push_back(operand.uid);
            return tuple_of(uids);
          },
          nb::sig("def uids(self) -> tuple[int, ...]"), "Rising.")
      .def_prop_ro(
          "operands", [](const VariantPack& self) { return self.operands(); },
          nb::sig("def operands(self) -> list[PackOperand]"), "By rising uid.")
      .def("index_of", &VariantPack::index_of, "uid"_a,
           "Where in `operands` a uid is; ValueError if nowhere.");
  nb::class_<GraphOperands>(
      m, "GraphOperands",
      "The inputs and outputs of a graph, from rows (tensor, label, uid, dtype, dim, stride, "
      "is_output). Knows tensors by identity and keeps none alive. Buffers have the rows' dims, and their "
      "strides unless any_strides.")
      .def(nb::new_(&make_operands), "rows"_a, "any_strides"_a = false)
      .def("write_over", &GraphOperands::write_over, "output"_a, "input"_a,
           "Says, by rows, that an output is an input's buffer, written over: both then take one buffer.")
      .def(
          "pack",
          [](const GraphOperands& self, nb::handle buffers, std::optional<int> device, nb::handle stream) {
            return new VariantPack(self, buffers, place_of(device, stream));
          },
          "buffers"_a.none(), "device"_a = nb::none(), "stream"_a.none() = 0,
          "Reads a dictionary from tensors or uids to buffers, for a CUDA ordinal or (None) the CPU. "
          "ValueError or "
          "TypeError names the tensor, what came and the rule.");
}

class Executable {
 public:
  Executable(std::shared_ptr<const GraphOperands> operands, const nb::bytes& artifact, bool cuda, int device,
             std::string device_kind)
      : operands_(std::move(operands)),
        device_(cuda ? ordinal_of(device) : kNoDevice),
        kind_(std::move(device_kind)) {
    const Platform platform = cuda ? Platform::kCuda : Platform::kCpu;
    {
      nb::gil_scoped_release release;
      program_ =
          Program::share(reinterpret_cast<const uint8_t*>(artifact.c_str()), artifact.size(), platform);
    }
    if (operands_->any_strides()) {
      throw Error(ErrorKind::kInvalidArgument,
                  "operands: any_strides, and a program has the strides that it was built for");
    }
    if (program_->operands().size() != operands_->all().size()) {
      throw Error(ErrorKind::kInvalidArgument,
                  "artifact: has " + std::to_string(program_->operands().size()) +
                      " operands, the graph has " + std::to_string(operands_->all().size()));
    }
  }

  int64_t workspace_size() const { return program_->workspace(); }

  void execute(nb::handle buffers, nb::handle workspace, nb::handle handle) const {
    UserHandle* user = handle.is_none() ? nullptr : &handle_of(handle);
    Place place{program_->platform(), device_, nullptr};
    if (user != nullptr) {
      const int device = user->device();  // also tells a destroyed handle on the CPU
      if (place.platform == Platform::kCuda) {
        place.device = device;
        place.stream = user->checked_stream();
      }
    }

    Held held;
    BufferReader reader(place, held);
    std::array<void*, kMaxOperands> pointers;
    operands_->read(buffers, place, reader,
                    [&pointers](size_t slot, const BufferView& view) { pointers[slot] = view.data; });
    Call call;
    call.stream = place.stream;
    call.device = place.device;
    call.operands = pointers.data();
    call.nbytes = program_->nbytes();
    call.workspace = workspace_of(workspace, place, reader, pointers.data());
    call.handle = user;
    {
      nb::gil_scoped_release release;
      run(call);
    }
  }

 private:
  std::byte* workspace_of(nb::handle workspace, const Place& place, BufferReader& reader,
                          void* const* pointers) const {
    const int64_t wanted = program_->workspace();
    const auto refuse = [wanted](const std::string& what) {
      throw Error(ErrorKind::kInvalidArgument,
                  "workspace: " + what + ", the rule is at least " + std::to_string(wanted) + " bytes");
    };
    if (workspace.is_none()) {
      if (wanted > 0) refuse("got None");
      return nullptr;
    }
    static const std::string label = "workspace";
    BufferView view;
    reader.read(workspace.ptr(), label, view);
    if (!view.address) {
      int64_t bits = dlpack_dtype_of(view.xla_dtype).bits;
      for (int64_t i = 0; i < view.rank; ++i) {
        if (view.shape[i] < 0 || __builtin_mul_overflow(bits, view.shape[i], &bits)) {
          refuse("the buffer has dim " + describe_dims(view.shape, view.rank));
        }
      }
      if (bits / 8 < wanted) refuse("got " + std::to_string(bits / 8) + " bytes");
      if (!place.takes(view.device)) {
        throw Error(ErrorKind::kInvalidArgument, "workspace: the graph runs on " + place.describe() +
                                                     ", the buffer is on " + describe(view.device));
      }
      if (view.read_only || view.immutable) {
        throw Error(ErrorKind::kInvalidArgument, "workspace: the buffer is read-only");
      }
      int64_t dense = 1;
      for (int64_t i = view.rank; view.strides != nullptr && i-- > 0;) {
        if (view.shape[i] != 1 && view.strides[i] != dense) {
          throw Error(ErrorKind::kInvalidArgument, "workspace: the buffer has strides " +
                                                       describe_dims(view.strides, view.rank) +
                                                       ", the rule is no gaps");
        }
        dense *= view.shape[i];
      }
    }
    if (wanted == 0) return nullptr;
    const bool on_cuda = place.platform == Platform::kCuda;
    // As for the workspace of a custom call: what the steps of the platform ask for.
    const uintptr_t alignment = on_cuda ? kWorkspaceAlignment : kOperandAlignment;
    if (view.data == nullptr || number(view.data) % alignment != 0) {
      throw Error(ErrorKind::kInvalidArgument,
                  "workspace: its address is " + std::to_string(number(view.data)) +
                      ", the rule is a multiple of " + std::to_string(alignment));
    }
    operands_->check_apart(view.data, wanted, "workspace", pointers);
    return static_cast<std::byte*>(view.data);
  }

  void run(const Call& call) const {
    if (program_->platform() == Platform::kCpu) {
      if (!program_->loaded(kNoDevice)) program_->load(kNoDevice);
      program_->run(call);
    } else {
      ContextScope scope(call.stream, call.device);
      if (!program_->loaded(call.device)) load_on_cuda(call.device);
      program_->run(call);
    }
    add(counters().executions);
  }

  void load_on_cuda(int device) const {
    const DeviceInfo& info = device_info(device);
    if (info.name != kind_) {
      throw Error(ErrorKind::kFailedPrecondition, "handle: the graph was planned for " + kind_ + ", device " +
                                                      std::to_string(device) + " is " + info.name);
    }
    program_->load(device);
  }

  const std::shared_ptr<const GraphOperands> operands_;
  const int device_;  // where a call without a handle runs
  const std::string kind_;
  std::shared_ptr<Program> program_;
};

void bind_executable(nb::module_& m) {
  nb::class_<Executable>(m, "Executable", "A graph's program, run on buffers of the caller.")
      .def(
          "__init__",
          [](Executable* self, const GraphOperands& operands, const nb::bytes& artifact,
             std::optional<int> device, const std::string& device_kind) {
            new (self) Executable(std::make_shared<const GraphOperands>(operands), artifact,
                                  device.has_value(), device.value_or(0), device_kind);
          },
          "operands"_a, "artifact"_a, "device"_a = nb::none(), "device_kind"_a = "",
          "device is the CUDA ordinal that a call without a handle runs on, None for a program of the CPU; "
          "device_kind is the name of the devices that the program was planned for.")
      .def_prop_ro("workspace_size", &Executable::workspace_size, "Bytes.")
      .def("execute", &Executable::execute, "buffers"_a.none(), "workspace"_a = nb::none(),
           "handle"_a = nb::none(),
           "Runs the program on the handle's device and stream. See cudnn_jax.pygraph.execute.");
}

}  // namespace

void bind_programs(nb::module_& m) {
  bind_packs(m);
  bind_executable(m);
}

}  // namespace cudnn_jax
