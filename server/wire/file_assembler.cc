#include "server/wire/file_assembler.h"

#include <algorithm>
#include <utility>

#include "server/wire/field_checks.h"
#include "src/base/status_macros.h"

namespace weft::server {

template <typename Message>
absl::Status FileAssembler<Message>::Add(const Message& message) {
  switch (message.part_case()) {
    case Message::kOptions: {
      if (request_) {
        return BadField("options", "is sent again, must come once, first");
      }
      WEFT_ASSIGN_OR_RETURN(request_,
                            ReadOptions(message.options(), engine_names_));
      return absl::OkStatus();
    }
    case Message::kChunk:
      if (!request_) {
        return BadField("options", "is required in the first message");
      }
      return AddChunk(message.chunk());
    case Message::PART_NOT_SET:
      break;
  }
  return BadField("part", "is required");
}

template <typename Message>
absl::Status FileAssembler<Message>::AddChunk(const v1::FileChunk& chunk) {
  WEFT_RETURN_IF_ERROR(CheckName("chunk.name", chunk.name()));
  if (chunk.data().size() > kMaxChunkBytes) {
    return BadField("chunk.data", "has ", chunk.data().size(),
                    " bytes, must be at most ", kMaxChunkBytes);
  }
  PeftFiles& files = request_->files;
  if (files.empty() || files.back().first != chunk.name()) {
    const bool seen = std::any_of(
        files.begin(), files.end(),
        [&chunk](const auto& file) { return file.first == chunk.name(); });
    if (seen) {
      return BadField("chunk.name", "is ", Quoted(chunk.name()),
                      " again after another file, must send the "
                      "pieces of a file together");
    }
    if (files.size() == kMaxFiles) {
      return BadField("chunk.name", "starts file ", kMaxFiles + 1,
                      ", must be at most ", kMaxFiles);
    }
    files.emplace_back(chunk.name(), "");
  }
  files.back().second.append(chunk.data());
  return absl::OkStatus();
}

template <typename Message>
absl::StatusOr<typename FileAssembler<Message>::Request>
FileAssembler<Message>::Finish() {
  if (!request_) {
    return BadField("options", "is required in the first message");
  }
  const bool has_config = std::any_of(
      request_->files.begin(), request_->files.end(),
      [](const auto& file) { return file.first == "adapter_config.json"; });
  if (!has_config) {
    return BadField("chunk", "never named adapter_config.json, must send it");
  }
  return *std::exchange(request_, std::nullopt);
}

template class FileAssembler<v1::ImportAdapterRequest>;
template class FileAssembler<v1::UploadCheckpointRequest>;

}  // namespace weft::server
