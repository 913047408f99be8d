#include <algorithm>
#include <deque>
#include <fstream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/weftctl/commands.h"
#include "client/weftctl/data_file.h"
#include "client/weftctl/progress_bar.h"
#include "nlohmann/json.hpp"
#include "src/base/clock.h"

namespace weft::weftctl {
namespace {

struct TrainOptions {
  int64_t num_steps = 0;
  size_t batch_size = 0;
  v1::LoraConfig config;
  v1::AdamWConfig adamw;
};

absl::StatusOr<TrainOptions> ReadOptions(const Arguments& arguments) {
  TrainOptions options;
  const auto steps = arguments.GetInt("steps");
  if (!steps.ok()) return steps.status();
  options.num_steps = *steps;
  const auto batch = arguments.GetInt("batch");
  if (!batch.ok()) return batch.status();
  if (*batch == 0) return UsageError("--batch: 0 is not >= 1");
  options.batch_size = static_cast<size_t>(*batch);
  const auto rank = arguments.GetUint32("rank");
  if (!rank.ok()) return rank.status();
  options.config.set_rank(*rank);
  const auto alpha = arguments.GetDouble("alpha");
  if (!alpha.ok()) return alpha.status();
  options.config.set_alpha(*alpha);
  const auto rate = arguments.GetDouble("lr");
  if (!rate.ok()) return rate.status();
  options.adamw.set_learning_rate(*rate);
  const auto clip = arguments.GetDouble("max-grad-norm");
  if (!clip.ok()) return clip.status();
  options.adamw.set_max_grad_norm(*clip);
  return options;
}

// Trains an adapter. Sends ForwardBackward and OptimStep of a step before it
// reads the results of the previous step. So the server seldom waits for this
// process.
class Trainer {
 public:
  Trainer(const Session& session, client::AdapterHandle& adapter,
          const TrainOptions& options, const std::vector<Example>& examples)
      : session_(session),
        adapter_(adapter),
        options_(options),
        examples_(examples),
        bar_(session.err, session.is_terminal) {}

  absl::Status Run() {
    absl::Status status;
    for (int64_t step = 0; status.ok() && step < options_.num_steps; ++step) {
      Send(step);
      if (in_flight_.size() > 1) status = Receive();
    }
    while (status.ok() && !in_flight_.empty()) status = Receive();
    bar_.Finish();
    return status;
  }

 private:
  struct Step {
    client::Future<client::TrainReply> gradient;
    client::Future<client::OptimReply> update;
    size_t num_tokens;
  };

  void Send(int64_t step) {
    std::vector<v1::Datum> data;
    size_t num_tokens = 0;
    size_t next = static_cast<size_t>(step) * options_.batch_size;
    for (size_t i = 0; i < options_.batch_size; ++i, ++next) {
      const Example& example = examples_[next % examples_.size()];
      data.push_back(example.datum);
      num_tokens += example.num_scored;
    }
    v1::LossConfig loss;
    loss.set_function(v1::LOSS_FUNCTION_CROSS_ENTROPY);
    auto gradient = adapter_.ForwardBackward(std::move(data), loss);
    auto update = adapter_.OptimStep(options_.adamw);
    in_flight_.push_back({std::move(gradient), std::move(update), num_tokens});
  }

  absl::Status Receive() {
    Step step = std::move(in_flight_.front());
    in_flight_.pop_front();
    const auto gradient = step.gradient.get();
    const auto update = step.update.get();
    if (!gradient.ok()) return gradient.status();
    if (!update.ok()) return update.status();
    num_tokens_ += step.num_tokens;
    const double seconds = absl::ToDoubleSeconds(SteadyNow() - start_);
    const double loss = gradient->message.metrics().at("loss:sum");
    TrainProgress progress;
    progress.step = ++num_done_;
    progress.num_steps = options_.num_steps;
    progress.loss_per_token =
        loss / static_cast<double>(std::max<size_t>(step.num_tokens, 1));
    progress.tokens_per_second =
        static_cast<double>(num_tokens_) / std::max(seconds, 1e-9);
    progress.grad_norm = update->message.grad_norm();
    if (session_.json) {
      const nlohmann::json line = {{"step", progress.step},
                                   {"loss:sum", loss},
                                   {"loss_per_token", progress.loss_per_token},
                                   {"grad_norm", progress.grad_norm},
                                   {"tokens", step.num_tokens}};
      session_.out << line.dump() << "\n";
    }
    if (!session_.json || session_.is_terminal) bar_.Show(progress);
    return absl::OkStatus();
  }

  const Session& session_;
  client::AdapterHandle& adapter_;
  const TrainOptions& options_;
  const std::vector<Example>& examples_;
  ProgressBar bar_;
  const absl::Time start_ = SteadyNow();
  size_t num_tokens_ = 0;
  int64_t num_done_ = 0;
  std::deque<Step> in_flight_;
};

// Saves a checkpoint if --save names one. The request has the next step number,
// so that the client may repeat it.
absl::Status SaveAtEnd(const Session& session,
                       const client::AdapterHandle& adapter) {
  v1::SaveCheckpointRequest request;
  request.set_adapter_id(adapter.id());
  request.set_name(session.arguments.GetString("save"));
  if (request.name().empty()) return absl::OkStatus();
  request.set_overwrite(true);
  request.set_step(adapter.next_step());
  const auto saved = session.client.SaveCheckpoint(request);
  if (!saved.ok()) return saved.status();
  if (session.json) {
    const nlohmann::json line = {{"checkpoint", saved->name()},
                                 {"step", saved->last_step()}};
    session.out << line.dump() << "\n";
  } else {
    session.out << "saved " << adapter.id() << " as " << saved->name()
                << " at step " << saved->last_step() << "\n";
  }
  return absl::OkStatus();
}

absl::Status Train(const Session& session) {
  const auto options = ReadOptions(session.arguments);
  if (!options.ok()) return options.status();
  const auto durability = ReadDurability(session.arguments);
  if (!durability.ok()) return durability.status();
  const std::string path = session.arguments.GetString("data");
  std::ifstream file(path);
  if (!file) {
    return UsageError(absl::StrCat("--data: cannot read '", path, "'"));
  }
  const auto examples = ReadExamples(file, path);
  if (!examples.ok()) return examples.status();
  const std::string& id = session.arguments.word(0);
  auto adapter = session.client.OpenAdapter(id);
  if (absl::IsNotFound(adapter.status())) {
    adapter = session.client.CreateAdapter(
        id, options->config, session.arguments.GetString("tenant"),
        *durability);
  }
  if (!adapter.ok()) return adapter.status();
  const absl::Status trained =
      Trainer(session, **adapter, *options, *examples).Run();
  if (!trained.ok()) return trained;
  return SaveAtEnd(session, **adapter);
}

}  // namespace

std::vector<Command> TrainCommands() {
  return {
      {"train",
       "Train an adapter on token ids and save it; makes the adapter if it is "
       "new.",
       {"ADAPTER"},
       {{"data", "FILE.jsonl", "lines {\"tokens\": [...]}", ""},
        {"steps", "N", "optimizer steps", "10"},
        {"batch", "N", "sequences per step, taken in turn", "8"},
        {"lr", "RATE", "learning rate", "1e-4"},
        {"max-grad-norm", "G", "clip the gradient; 0: off", "0"},
        {"save", "NAME", "checkpoint at the end; empty: none", "latest"},
        {"rank", "R", "rank of a new adapter", "32"},
        {"alpha", "A", "alpha of a new adapter", "32"},
        DurabilityFlag(),
        TenantFlag()},
       Train}};
}

}  // namespace weft::weftctl
