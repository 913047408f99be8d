#include "src/executor/channel.h"

#include <ATen/ATen.h>

#include <cstring>
#include <memory>
#include <utility>

namespace weft::executor {

void SendMessage(const Message& message, parallel::Communicator& commands) {
  const std::string bytes = Encode(message);
  at::Tensor size = at::tensor({static_cast<int64_t>(bytes.size())});
  commands.Broadcast(size);
  at::Tensor content =
      at::empty({static_cast<int64_t>(bytes.size())}, at::kByte);
  std::memcpy(content.mutable_data_ptr(), bytes.data(), bytes.size());
  commands.Broadcast(content);
}

std::string ReceiveMessage(parallel::Communicator& commands) {
  at::Tensor size = at::zeros({1}, at::kLong);
  commands.Broadcast(size);
  at::Tensor content = at::empty({size.item<int64_t>()}, at::kByte);
  commands.Broadcast(content);
  return {static_cast<const char*>(content.const_data_ptr()), content.nbytes()};
}

lora::AdapterVersionPtr MakeVersion(const model::Decoder& decoder,
                                    const LoraConfig& config,
                                    at::Tensor compute_N) {
  auto version = std::make_shared<lora::AdapterVersion>();
  version->layout = std::make_shared<lora::AdapterLayout>(
      decoder.local_config().shape(), config);
  version->compute_N = std::move(compute_N);
  return version;
}

}  // namespace weft::executor
