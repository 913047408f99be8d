// Trains an adapter to repeat a sequence, then samples from it.
//   weft_example [host:port]
#include <iostream>
#include <utility>
#include <vector>

#include "client/weft_client.h"

namespace {

absl::Status Run(const std::string& target) {
  const auto connected = weft::Client::Connect({.target = target});
  if (!connected.ok()) return connected.status();
  weft::Client* const client = connected->get();
  weft::v1::LoraConfig config;
  config.set_rank(8);
  auto adapter = client->CreateAdapter("example", config);
  if (!adapter.ok()) return adapter.status();

  const auto datum = weft::client::NextTokenDatum({1, 2, 3, 4, 5, 6, 7, 8});
  if (!datum.ok()) return datum.status();
  weft::v1::LossConfig loss;
  loss.set_function(weft::v1::LOSS_FUNCTION_CROSS_ENTROPY);
  weft::v1::AdamWConfig adamw;
  adamw.set_learning_rate(1e-3);
  for (int i = 0; i < 10; ++i) {
    // Sends both steps before waiting for the first result.
    auto gradient = (*adapter)->ForwardBackward({*datum}, loss);
    auto step = (*adapter)->OptimStep(adamw);
    const auto trained = gradient.get();
    if (!trained.ok()) return trained.status();
    if (const auto stepped = step.get(); !stepped.ok()) return stepped.status();
    std::cout << "loss " << trained->message.metrics().at("loss:sum") << "\n";
  }
  weft::v1::SampleRequest request;
  request.set_adapter_id("example");
  request.add_prompt(1);
  request.mutable_config()->set_max_tokens(7);
  const auto sample = client->Sample(request);
  if (!sample.ok()) return sample.status();
  for (uint32_t token : sample->samples(0).tokens()) std::cout << token << " ";
  std::cout << "\n";
  return client->DeleteAdapter("example");
}

}  // namespace

int main(int argc, char** argv) {
  const absl::Status status = Run(argc > 1 ? argv[1] : "127.0.0.1:50051");
  if (!status.ok()) std::cerr << status << "\n";
  return status.ok() ? 0 : 1;
}
