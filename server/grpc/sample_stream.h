// SamplingService.SampleStream.
#ifndef WEFT_SERVER_GRPC_SAMPLE_STREAM_H_
#define WEFT_SERVER_GRPC_SAMPLE_STREAM_H_

#include <cstddef>

#include "server/grpc/raw_service.h"

namespace weft::server {

// If tokens come faster than the client reads, they are merged into one waiting
// message per sample. If more than kMaxWaitingValues wait, the call is
// cancelled, so that a slow client cannot hold the server's memory.
void AddSampleStream(RawService* service);

// The most tokens and top-logprob entries that may wait for a slow client,
// about 8 bytes each.
inline constexpr size_t kMaxWaitingValues = 1 << 20;

}  // namespace weft::server

#endif  // WEFT_SERVER_GRPC_SAMPLE_STREAM_H_
