// A call of a service without a connection. A test's thread runs the handler,
// and another thread replaces gRPC's threads. gRPC's own threads are not
// instrumented, so ThreadSanitizer would report many false races.
//
//   DirectUnary call(&wire);
//   call.Start(service.Drain(call.context(), &request, &response));
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
#include "src/base/mutex.h"
#include "src/base/worker.h"

namespace weft {

// The part that all kinds of calls share. `Call` is the interface through which
// a `Reactor` uses gRPC. The object must live until Wait returns. Threads: one
// thread calls Start. After Start, any thread may call the other methods.
template <typename Call, typename Reactor>
class DirectCall : public Call {
 public:
  // `wire` runs the reactor's callbacks, except OnCancel. `wire` must outlive
  // the call. Several calls may share one wire.
  explicit DirectCall(Worker* wire) : wire_(*wire) {}

  [[nodiscard]] grpc::CallbackServerContext* context() { return &context_; }

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

  void Finish(grpc::Status status) override ABSL_LOCKS_EXCLUDED(mu_) {
    {
      MutexLock lock(&mu_);
      status_ = std::move(status);
    }
    End();
  }
  void SendInitialMetadata() override {}

 protected:
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

  // Set before the reactor asks for anything.
  Reactor* reactor_ = nullptr;
  grpc::CallbackServerContext context_;

 private:
  // gRPC calls these two functions for its own calls only.
  void CallOnDone() override {}
  grpc::internal::ServerReactor* reactor() override { return reactor_; }

  Worker& wire_;
  Mutex mu_;
  CondVar changed_;
  int under_way_ ABSL_GUARDED_BY(mu_) = 2;  // Counts what OnDone must wait for.
  bool done_ ABSL_GUARDED_BY(mu_) = false;
  grpc::Status status_ ABSL_GUARDED_BY(mu_);
};

using DirectUnary =
    DirectCall<grpc::ServerCallbackUnary, grpc::ServerUnaryReactor>;

// A call in which the server streams.
template <typename Response>
class DirectWriter final
    : public DirectCall<grpc::ServerCallbackWriter<Response>,
                        grpc::ServerWriteReactor<Response>> {
 public:
  using DirectWriter::DirectCall::DirectCall;

  // Returns the client's messages. Call it after Wait.
  [[nodiscard]] const std::vector<Response>& received() const {
    return received_;
  }

  void Write(const Response* message, grpc::WriteOptions) override {
    this->OnWire([this, message] {
      const bool ok = !this->context_.IsCancelled();
      if (ok) received_.push_back(*message);
      this->reactor_->OnWriteDone(ok);
    });
  }
  void WriteAndFinish(const Response* message, grpc::WriteOptions options,
                      grpc::Status status) override {
    Write(message, options);
    this->Finish(std::move(status));
  }

 private:
  std::vector<Response> received_;  // Used by the wire until the call ends.
};

// A call in which the client streams `requests` and then half-closes.
template <typename Request>
class DirectReader final
    : public DirectCall<grpc::ServerCallbackReader<Request>,
                        grpc::ServerReadReactor<Request>> {
 public:
  DirectReader(Worker* wire, std::vector<Request> requests)
      : DirectReader::DirectCall(wire), requests_(std::move(requests)) {}

  void Read(Request* message) override {
    this->OnWire([this, message] {
      const bool ok = next_ < requests_.size() && !this->context_.IsCancelled();
      if (ok) *message = requests_[next_++];
      this->reactor_->OnReadDone(ok);
    });
  }

 private:
  const std::vector<Request> requests_;
  size_t next_ = 0;  // Used by the wire.
};

}  // namespace weft

#endif  // WEFT_TESTS_SUPPORT_DIRECT_CALL_H_
