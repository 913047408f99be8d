// Runs on each rank other than 0 and executes the messages of rank 0.
#ifndef WEFT_SRC_EXECUTOR_REMOTE_WORKER_H_
#define WEFT_SRC_EXECUTOR_REMOTE_WORKER_H_

#include <cstdint>
#include <map>

#include "src/executor/message.h"
#include "src/executor/model_runner.h"
#include "src/parallel/communicator.h"

namespace weft::executor {

// Threads: not thread-safe.
class RemoteWorker {
 public:
  // `decoder` and `links` outlive the worker.
  RemoteWorker(const model::Decoder& decoder, const loss::HeadOptions& head,
               parallel::Links* links)
      : runner_(decoder, head), links_(*links) {}

  // Executes messages until a StopCommand. Throws std::exception, for example
  // if another rank is lost.
  void Run();

 private:
  void Do(const CacheSize& message);
  void Do(const NewVersion& message);
  void Do(const DropVersions& message);
  void Do(TrainCommand& message);
  void Do(const GradientsCommand& message);
  void Do(CacheCommand& message);
  void Do(const CacheCopy& copy);
  void Do(const StopCommand& message);

  // Returns the weights that rank 0 has sent with this id. Throws c10::Error if
  // there are none.
  lora::AdapterVersionPtr VersionOf(uint64_t id) const;
  // Only the first replica has the cache, so only it samples.
  bool samples() const { return links_.replica() == 0; }

  ModelRunner runner_;
  parallel::Links& links_;
  model::KvStore cache_;
  std::map<uint64_t, lora::AdapterVersionPtr> versions_;
  bool has_plan_ = false;
  bool stopped_ = false;
};

}  // namespace weft::executor

#endif  // WEFT_SRC_EXECUTOR_REMOTE_WORKER_H_
