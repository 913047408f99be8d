#include "server/grpc/call_reactor.h"

#include "absl/strings/str_cat.h"
#include "server/call/rpc_policy.h"
#include "src/base/reason.h"

namespace weft::server {

std::string CallReactor::Reader() const {
  // Calls with small requests do not wait for those with large ones.
  const bool large = record_.MostRequestBytes() > kMaxPromptRequestBytes;
  const std::string& peer = record_.peer();
  const std::string owner =
      record_.caller().ok() ? OwnerKey(*record_.caller()) : "";
  return absl::StrCat(large ? "large " : "small ",
                      owner.empty() ? peer.substr(0, peer.rfind(':')) : owner);
}

void CallReactor::Read(int64_t most) {
  // Once the read has begun, the call may end on another thread.
  const std::shared_ptr<CallReactor> alive = self_;
  ReadTurns& reads = record_.core()->reads;
  const bool has_place = reads.Begin(reader_, this, [this, most] {
    record_.AwaitClient(most);
    StartRead(&bytes_);
  });
  if (has_place) {
    // A call that was cancelled before it had its place does not wait in it.
    if (cancelled_ && reads.Remove(reader_, this)) OnRead(/*ok=*/false);
    return;
  }
  EndUnread(WithReason(
      absl::ResourceExhaustedError(absl::StrCat(
          ReadTurns::kMostWaiting,
          " of your calls wait until the requests of others have come: end "
          "those first")),
      {.name = "CALLS_UNDER_WAY",
       .values = {{"limit", absl::StrCat(ReadTurns::kMostWaiting)}}}));
}

void CallReactor::OnReadDone(bool ok) {
  record_.StopAwaiting();
  record_.core()->reads.End(reader_);
  OnRead(ok);
}

void CallReactor::OnCancel() {
  cancelled_ = true;
  cancel_.Cancel();
  if (record_.core()->reads.Remove(reader_, this)) OnRead(/*ok=*/false);
}

absl::StatusOr<std::shared_ptr<void>> CallReactor::Parse(
    google::protobuf::Message* request) {
  record_.CountReceived();
  return record_.Parse(&bytes_, request);
}

void CallReactor::Write(const google::protobuf::Message& message) {
  record_.CountSent();
  record_.AwaitClient();
  bytes_ = ToBytes(message);
  StartWrite(&bytes_);
}

void CallReactor::Send(const google::protobuf::Message& reply) {
  const auto size = static_cast<int64_t>(reply.ByteSizeLong());
  const absl::Status held = record_.HoldReply(size);
  if (!held.ok()) return End(held);
  record_.CountSent();
  record_.AwaitClient(size);
  bytes_ = ToBytes(reply);
  StartWriteAndFinish(&bytes_, grpc::WriteOptions(),
                      record_.Close(absl::OkStatus()));
}

void CallReactor::EndUnread(const absl::Status& status) {
  record_.CountArrived();
  End(status);
}

void CallReactor::End(const absl::Status& status) {
  record_.AwaitClient();
  Finish(record_.Close(status));
}

void CallReactor::OnDone() {
  cancel_.Clear();
  record_.Release();
  const std::shared_ptr<CallReactor> self = std::move(self_);
}

}  // namespace weft::server
