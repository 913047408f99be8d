#include "server/grpc/raw_service.h"

#include <utility>

#include "grpcpp/impl/codegen/server_callback_handlers.h"

namespace weft::server {

void RawService::AddHandler(Rpc rpc, Handler handler) {
  const auto& added = handlers_.emplace(rpc, std::move(handler)).first->second;
  AddMethod(new grpc::internal::RpcServiceMethod(
      RpcPath(rpc), grpc::internal::RpcMethod::BIDI_STREAMING, nullptr));
  MarkMethodRawCallback(
      static_cast<int>(handlers_.size()) - 1,
      new grpc::internal::CallbackBidiHandler<grpc::ByteBuffer,
                                              grpc::ByteBuffer>(added));
}

}  // namespace weft::server
