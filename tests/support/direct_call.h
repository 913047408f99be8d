// A call of a service without a connection. A test's thread runs the handler,
// and another thread replaces gRPC's threads. gRPC's own threads are not
// instrumented, so ThreadSanitizer would report many false races.
//
//   DirectCall call(&wire, {request});
//   call.Start(service.Start(Rpc::kDrain, call.context()));
//   const grpc::Status status = call.Wait();
//
// A program that links direct_call.cc cannot also serve or open a connection.
#ifndef WEFT_TESTS_SUPPORT_DIRECT_CALL_H_
#define WEFT_TESTS_SUPPORT_DIRECT_CALL_H_

#include <cstddef>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "grpcpp/grpcpp.h"
#include "src/base/threads/mutex.h"
#include "src/base/threads/worker.h"

namespace weft {

// A call in which the client sends `requests` and then half-closes. The object
// must live until Wait returns. Threads: one thread calls Start. After Start,
// any thread may call the other methods.
class DirectCall final
    : public grpc::ServerCallbackReaderWriter<grpc::ByteBuffer,
                                              grpc::ByteBuffer> {
 public:
  using Reactor = grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>;

  // `wire` runs the reactor's callbacks, except OnCancel. `wire` must outlive
  // the call. Several calls may share one wire.
  DirectCall(Worker* wire, std::vector<grpc::ByteBuffer> requests)
      : requests_(std::move(requests)), wire_(*wire) {}

  grpc::CallbackServerContext* context() { return &context_; }

  // Call it after the handler has returned. This call makes the handler's
  // operations on the reactor take effect.
  void Start(Reactor* reactor) {
    reactor_ = reactor;
    this->BindReactor(reactor);
    End();
  }

  // Cancels the call as a client would. Does nothing if the call has ended.
  void Cancel() ABSL_LOCKS_EXCLUDED(mu_) {
    if (!Begin()) return;
    context_.TryCancel();
    reactor_->OnCancel();
    End();
  }

  // Waits until the reactor has been destroyed, and returns the status.
  [[nodiscard]] grpc::Status Wait() ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    while (!done_) changed_.Wait(&mu_);
    return status_;
  }

  // Returns the server's messages. Call it after Wait.
  const std::vector<grpc::ByteBuffer>& received() const { return received_; }

  void Read(grpc::ByteBuffer* message) override {
    OnWire([this, message] {
      const bool ok = next_ < requests_.size() && !context_.IsCancelled();
      if (ok) *message = requests_[next_++];
      reactor_->OnReadDone(ok);
    });
  }
  void Write(const grpc::ByteBuffer* message, grpc::WriteOptions) override {
    OnWire([this, message] {
      const bool ok = !context_.IsCancelled();
      if (ok) received_.push_back(*message);
      reactor_->OnWriteDone(ok);
    });
  }
  void WriteAndFinish(const grpc::ByteBuffer* message, grpc::WriteOptions,
                      grpc::Status status) override {
    received_.push_back(*message);
    Finish(std::move(status));
  }
  void Finish(grpc::Status status) override ABSL_LOCKS_EXCLUDED(mu_) {
    {
      MutexLock lock(&mu_);
      status_ = std::move(status);
    }
    End();
  }
  void SendInitialMetadata() override {}

 private:
  // Begins an operation, during which the reactor stays alive. Returns false if
  // the call has ended.
  bool Begin() ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    if (under_way_ == 0) return false;
    ++under_way_;
    return true;
  }
  void End() ABSL_LOCKS_EXCLUDED(mu_) {
    {
      MutexLock lock(&mu_);
      if (--under_way_ > 0) return;
    }
    wire_.Post([this] {
      reactor_->OnDone();
      MutexLock lock(&mu_);
      done_ = true;
      changed_.NotifyAll();
    });
  }
  // Runs `task` on the wire. The reactor is alive, because it asked for `task`.
  template <typename Task>
  void OnWire(Task task) {
    (void)Begin();
    wire_.Post([this, task = std::move(task)] {
      task();
      End();
    });
  }

  // gRPC calls these two functions for its own calls only.
  void CallOnDone() override {}
  grpc::internal::ServerReactor* reactor() override { return reactor_; }

  const std::vector<grpc::ByteBuffer> requests_;
  size_t next_ = 0;                         // Used by the wire.
  std::vector<grpc::ByteBuffer> received_;  // Used by the reactor's thread.
  Reactor* reactor_ = nullptr;  // Set before the reactor asks for anything.
  grpc::CallbackServerContext context_;
  Worker& wire_;
  Mutex mu_;
  CondVar changed_;
  int under_way_ ABSL_GUARDED_BY(mu_) = 2;  // Counts what OnDone must wait for.
  bool done_ ABSL_GUARDED_BY(mu_) = false;
  grpc::Status status_ ABSL_GUARDED_BY(mu_);
};

}  // namespace weft

#endif  // WEFT_TESTS_SUPPORT_DIRECT_CALL_H_
