// The reactors of the gRPC calls. To gRPC every method is a stream of messages
// in both directions, which looks the same on the wire. So a call is counted,
// and its tenant charged, when its header arrives. gRPC would begin a unary
// call only when its request is there, and wait for it as long as the client
// likes.
// Threads: any, as gRPC and the engine call. Ownership: a reactor is shared by
// gRPC (until OnDone) and the callbacks that hold self().
#ifndef WEFT_SERVER_GRPC_CALL_REACTOR_H_
#define WEFT_SERVER_GRPC_CALL_REACTOR_H_

#include <atomic>
#include <memory>
#include <string>
#include <utility>

#include "google/protobuf/message.h"
#include "grpcpp/grpcpp.h"
#include "server/call/call.h"
#include "server/grpc/cancel_slot.h"

namespace weft::server {

class CallReactor
    : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  CallReactor(ServiceCore* core, grpc::CallbackServerContext* context, Rpc rpc)
      : record_(core, context, rpc) {}

  // Makes the reactor of a call whose header has arrived.
  template <typename Reactor, typename... Args>
  static CallReactor* Start(ServiceCore* core,
                            grpc::CallbackServerContext* context, Rpc rpc,
                            Args... args) {
    const auto call =
        std::make_shared<Reactor>(core, context, rpc, std::move(args)...);
    CallReactor& reactor = *call;
    reactor.self_ = call;
    const absl::Status entered = reactor.record_.entered();
    entered.ok() ? reactor.Begin() : reactor.EndUnread(entered);
    return &reactor;
  }

 protected:
  // Begins to read. Start calls it, once the caller may have another call.
  virtual void Begin() = 0;

  CallRecord& record() { return record_; }
  // REQUIRES: the call has not ended.
  std::shared_ptr<CallReactor> self() const { return self_; }
  void SetCancel(CancelHandle handle) { cancel_.Set(std::move(handle)); }
  void Cancel() { cancel_.Cancel(); }

  // Reads the next message when it is the client's turn (ReadTurns). The client
  // then has as long as for `most` bytes.
  void Read(int64_t most = 0);
  // The message is there, or there is none: the client has half-closed or gone.
  virtual void OnRead(bool ok) = 0;
  // Parses the message that was read. Errors and result: CallRecord::Parse.
  absl::StatusOr<std::shared_ptr<void>> Parse(
      google::protobuf::Message* request);
  // Sends one message of a stream.
  void Write(const google::protobuf::Message& message);
  // Ends the call with its only reply. The caller is charged for the reply
  // until its client has read it. Without room for it, the client gets the
  // error in its place, and may repeat the call: a step gives its stored reply
  // then.
  void Send(const google::protobuf::Message& reply);
  void End(const absl::Status& status);

  void OnCancel() override;
  void OnDone() override;

 private:
  void OnReadDone(bool ok) final;
  // Ends a call whose request is not read.
  void EndUnread(const absl::Status& status);
  // Returns who sends, and whether the messages may be large.
  std::string Reader() const;

  CallRecord record_;
  const std::string reader_ = Reader();
  CancelSlot cancel_;
  std::atomic<bool> cancelled_ = false;
  grpc::ByteBuffer bytes_;  // Belongs to gRPC while it reads or writes.
  std::shared_ptr<CallReactor> self_;
};

// A call with one request.
template <typename Request>
class RequestReactor : public CallReactor {
 public:
  using CallReactor::CallReactor;

 protected:
  // Runs the request.
  virtual void Run(const Request& request) = 0;

 private:
  void Begin() override { Read(record().MostRequestBytes()); }

  void OnRead(bool ok) override {
    if (!ok) {
      return End(
          absl::CancelledError("the client left before its request arrived"));
    }
    Request request;
    const auto charge = Parse(&request);
    charge.ok() ? Run(request) : End(charge.status());
  }
};

}  // namespace weft::server

#endif  // WEFT_SERVER_GRPC_CALL_REACTOR_H_
