// A handle of one adapter: numbers and sends its training steps, and scores
// data.
#ifndef WEFT_CLIENT_ADAPTER_HANDLE_H_
#define WEFT_CLIENT_ADAPTER_HANDLE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "client/connection.h"
#include "client/route.h"
#include "client/step_counter.h"
#include "client/unary_call.h"
#include "weft/v1/adapters.grpc.pb.h"
#include "weft/v1/training.grpc.pb.h"

namespace weft::client {

using TrainReply = Reply<v1::ForwardBackwardResponse>;
using ForwardReply = Reply<v1::ForwardResponse>;
using OptimReply = Reply<v1::OptimStepResponse>;

// ForwardBackward, Forward and OptimStep each send one step and return a future
// without waiting, so that several steps can be in flight. The server runs the
// steps in the order of the calls. If the server refuses a step while later
// steps are in flight, the later steps end with FAILED_PRECONDITION, and the
// handle needs a Resync(). It also needs a Resync() if it is unknown whether a
// step ran.
// Threads: any. Ownership: futures may outlive the handle.
class AdapterHandle {
 public:
  AdapterHandle(std::shared_ptr<Route> route, CallOptions options,
                const v1::Adapter& adapter);

  const std::string& id() const { return adapter_id_; }
  uint64_t next_step() const { return counter_->next_step(); }

  Future<TrainReply> ForwardBackward(std::vector<v1::Datum> data,
                                     v1::LossConfig loss);
  Future<ForwardReply> Forward(std::vector<v1::Datum> data,
                               v1::LossConfig loss);
  // Computes the same as Forward, but is not a step. It takes no step number
  // and does not wait for steps that have not reached the server. An empty
  // `snapshot` means the weights that are the latest when the server runs the
  // call.
  Future<ForwardReply> Score(std::vector<v1::Datum> data, v1::LossConfig loss,
                             absl::string_view snapshot = "");
  Future<OptimReply> OptimStep(v1::AdamWConfig adamw = {});
  // Drops the accumulated gradient.
  Future<OptimReply> ZeroGrad();

  // Asks the server for the number of the last step. The next step gets the
  // number after that. Errors: FAILED_PRECONDITION while steps are in flight;
  // the errors of GetAdapter.
  absl::Status Resync();

 private:
  template <typename Request, typename Response>
  Future<Reply<Response>> Submit(
      AsyncMethod<Training, Request, Response> method, Request request);

  const std::string adapter_id_;
  const CallOptions options_;
  // Calls in flight also hold route_ and counter_, because a call may
  // outlive the handle.
  const std::shared_ptr<Route> route_;
  const std::shared_ptr<StepCounter> counter_;
};

}  // namespace weft::client

#endif  // WEFT_CLIENT_ADAPTER_HANDLE_H_
