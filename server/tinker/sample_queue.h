// Samples that wait in the front because the engine's queue, or the tenant's
// part of it, is full: a client of the SDK has up to 2,000 under way. Owners
// take turns.
#ifndef WEFT_SERVER_TINKER_SAMPLE_QUEUE_H_
#define WEFT_SERVER_TINKER_SAMPLE_QUEUE_H_

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "server/call.h"
#include "src/request/reply.h"
#include "src/request/sample.h"
#include "weft/v1/sampling.pb.h"

namespace weft::tinker {

struct WaitingSample {
  std::string id;
  CallOrigin origin;
  v1::SampleRequest request;
  Callback<SampleResult> done;
  std::shared_ptr<void> reserved;  // Its memory.
};

// Threads: the front's.
class SampleQueue {
 public:
  void Add(const std::string& owner, WaitingSample sample);

  // Calls `start` with the first of each owner in turn. True: it is done with,
  // and the next one may start. False: this owner's others wait too. Returns
  // whether some still wait.
  bool Advance(const std::function<bool(const std::string& owner,
                                        const WaitingSample& sample)>& start);

  // Takes one out. False: it does not wait.
  bool Remove(const std::string& owner, const std::string& id);

 private:
  std::map<std::string, std::deque<WaitingSample>> owners_;  // Not empty.
  std::string last_;  // The owner that had the last turn.
  bool advances_ = false;
};

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_SAMPLE_QUEUE_H_
