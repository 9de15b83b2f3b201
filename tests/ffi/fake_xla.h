// Calls the handlers as XLA does, without XLA: call frames by hand over the FFI's C interface.
#pragma once

#include <string>
#include <vector>

#include "ffi/xla_handlers.h"
#include "testing.h"
#include "xla/ffi/api/c_api.h"

// What XLA hands to a stage; opaque to handlers.
struct XLA_FFI_ExecutionContext {
  void* state = nullptr;
  void* stream = nullptr;
  int device = 0;
};

struct XLA_FFI_Error {
  std::string message;
};

namespace cudnn_jax {

inline const XLA_FFI_Api& fake_api() {
  static const XLA_FFI_Api api = [] {
    XLA_FFI_Api made{};
    made.struct_size = XLA_FFI_Api_STRUCT_SIZE;
    made.api_version.major_version = XLA_FFI_API_MAJOR;
    made.api_version.minor_version = XLA_FFI_API_MINOR;
    made.XLA_FFI_Error_Create = [](XLA_FFI_Error_Create_Args* args) {
      return new XLA_FFI_Error{args->message};
    };
    made.XLA_FFI_State_Set = [](XLA_FFI_State_Set_Args* args) -> XLA_FFI_Error* {
      args->ctx->state = args->state;
      return nullptr;
    };
    made.XLA_FFI_State_Get = [](XLA_FFI_State_Get_Args* args) -> XLA_FFI_Error* {
      args->state = args->ctx->state;
      return nullptr;
    };
    made.XLA_FFI_Stream_Get = [](XLA_FFI_Stream_Get_Args* args) -> XLA_FFI_Error* {
      args->stream = args->ctx->stream;
      return nullptr;
    };
    made.XLA_FFI_DeviceOrdinal_Get = [](XLA_FFI_DeviceOrdinal_Get_Args* args) -> XLA_FFI_Error* {
      args->device_ordinal = args->ctx->device;
      return nullptr;
    };
    return made;
  }();
  return api;
}

// One call site: the state that XLA keeps for it. Several threads may call it at once.
class CallSite {
 public:
  CallSite(const Bytes& artifact, Platform platform)
      : artifact_(artifact),
        target_(platform == Platform::kCuda ? kCudaTarget : kCpuTarget),
        type_(platform == Platform::kCuda ? kCudaState : kCpuState) {
    type_.id->type_id = 1;
    XLA_FFI_ExecutionContext context;
    problem_ = stage(target_.instantiate, XLA_FFI_ExecutionStage_INSTANTIATE, context, {}, {});
    state_ = context.state;
  }
  ~CallSite() {
    if (state_ != nullptr) type_.info->deleter(state_);
  }
  CallSite(const CallSite&) = delete;
  CallSite& operator=(const CallSite&) = delete;

  const std::string& problem() const { return problem_; }  // of instantiate

  // Each returns the error's message, "" for none.
  std::string initialize(void* stream, int device) const {
    XLA_FFI_ExecutionContext context{state_, stream, device};
    return stage(target_.initialize, XLA_FFI_ExecutionStage_INITIALIZE, context, {}, {});
  }
  std::string execute(void* stream, int device, std::vector<XLA_FFI_Buffer>& args,
                      std::vector<XLA_FFI_Buffer>& results) const {
    XLA_FFI_ExecutionContext context{state_, stream, device};
    return stage(target_.execute, XLA_FFI_ExecutionStage_EXECUTE, context, pointers(args), pointers(results));
  }

  // The frame of one execution, to be called again and again with nothing around it.
  class Frame {
   public:
    Frame(const CallSite& site, void* stream, int device, std::vector<XLA_FFI_Buffer>& args,
          std::vector<XLA_FFI_Buffer>& results)
        : context_{site.state_, stream, device},
          args_(pointers(args)),
          results_(pointers(results)),
          frame_(site.frame(XLA_FFI_ExecutionStage_EXECUTE, context_, args_, results_)),
          handler_(site.target_.execute) {}
    bool execute() { return handler_(&frame_) == nullptr; }

   private:
    XLA_FFI_ExecutionContext context_;
    std::vector<void*> args_;
    std::vector<void*> results_;
    XLA_FFI_CallFrame frame_;
    XLA_FFI_Handler* handler_;
  };

 private:
  static std::vector<void*> pointers(std::vector<XLA_FFI_Buffer>& buffers) {
    std::vector<void*> made;
    for (XLA_FFI_Buffer& buffer : buffers) made.push_back(&buffer);
    return made;
  }

  XLA_FFI_CallFrame frame(XLA_FFI_ExecutionStage stage, XLA_FFI_ExecutionContext& context,
                          std::vector<void*>& args, std::vector<void*>& results) const {
    static std::vector<XLA_FFI_ArgType> arg_types(64, XLA_FFI_ArgType_BUFFER);
    static std::vector<XLA_FFI_RetType> ret_types(64, XLA_FFI_RetType_BUFFER);
    XLA_FFI_CallFrame made{};
    made.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
    made.api = &fake_api();
    made.ctx = &context;
    made.stage = stage;
    made.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, static_cast<int64_t>(args.size()), arg_types.data(),
                 args.data()};
    made.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, static_cast<int64_t>(results.size()), ret_types.data(),
                 results.data()};
    made.attrs = {XLA_FFI_Attrs_STRUCT_SIZE, nullptr, 1, &attribute_type_, &name_, &attribute_};
    return made;
  }

  std::string stage(XLA_FFI_Handler* handler, XLA_FFI_ExecutionStage which, XLA_FFI_ExecutionContext& context,
                    std::vector<void*> args, std::vector<void*> results) const {
    XLA_FFI_CallFrame called = frame(which, context, args, results);
    const std::unique_ptr<XLA_FFI_Error> error(handler(&called));
    return error == nullptr ? "" : error->message;
  }

  const Bytes artifact_;
  const TargetStages target_;
  const StateType type_;
  void* state_ = nullptr;
  std::string problem_;

  // The attribute "program".
  XLA_FFI_Array array_{XLA_FFI_DataType_U8, artifact_.size(), const_cast<uint8_t*>(artifact_.data())};
  XLA_FFI_ByteSpan span_{"program", 7};
  mutable XLA_FFI_ByteSpan* name_ = &span_;
  mutable void* attribute_ = &array_;
  mutable XLA_FFI_AttrType attribute_type_ = XLA_FFI_AttrType_ARRAY;
};

// The operands of one caller as XLA's buffers.
class XlaBuffers {
 public:
  explicit XlaBuffers(const Program& program) : blocks_(program) {
    const size_t inputs = static_cast<size_t>(program.inputs());
    for (size_t i = 0; i < program.operands().size(); ++i) {
      const OperandSpec& one = program.operands()[i];
      (i < inputs ? args : results).push_back(buffer(one.xla_dtype, blocks_.at<void>(i), one.shape));
    }
    workspace_ = {program.workspace()};
    if (program.workspace() > 0) {
      results.push_back(buffer(XLA_FFI_DataType_U8, blocks_.at<void>(program.operands().size()), workspace_));
    }
  }
  XlaBuffers(const XlaBuffers&) = delete;
  XlaBuffers& operator=(const XlaBuffers&) = delete;

  template <typename T>
  T* at(size_t operand) const {
    return blocks_.at<T>(operand);
  }

  std::vector<XLA_FFI_Buffer> args;
  std::vector<XLA_FFI_Buffer> results;

 private:
  static XLA_FFI_Buffer buffer(int dtype, void* data, const std::vector<int64_t>& shape) {
    return {XLA_FFI_Buffer_STRUCT_SIZE,           nullptr,
            static_cast<XLA_FFI_DataType>(dtype), data,
            static_cast<int64_t>(shape.size()),   const_cast<int64_t*>(shape.data())};
  }

  Buffers blocks_;
  std::vector<int64_t> workspace_;
};

}  // namespace cudnn_jax
