// Sends messages between the ranks, and makes adapter versions from received
// weights.
#ifndef WEFT_SRC_EXECUTOR_CHANNEL_H_
#define WEFT_SRC_EXECUTOR_CHANNEL_H_

#include <string>

#include "src/executor/message.h"
#include "src/model/decoder.h"
#include "src/parallel/communicator.h"

namespace weft::executor {

// SendMessage sends from rank 0 to all other ranks, which call ReceiveMessage.
// ReceiveMessage returns the bytes that Encode made of the message. On failure,
// both functions throw std::exception.
void SendMessage(const Message& message, parallel::Communicator& commands);
[[nodiscard]] std::string ReceiveMessage(parallel::Communicator& commands);

// Returns the adapter version with which this rank's decoder runs. `compute_N`
// has the N weights that the adapter adds to this rank's part of the model.
[[nodiscard]] lora::AdapterVersionPtr MakeVersion(const model::Decoder& decoder,
                                                  const LoraConfig& config,
                                                  at::Tensor compute_N);

}  // namespace weft::executor

#endif  // WEFT_SRC_EXECUTOR_CHANNEL_H_
