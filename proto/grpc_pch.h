// Headers that are precompiled for the targets that use gRPC: the server, the
// client and their tests. If not precompiled, the headers would take most of
// the compile time of these targets.
#ifndef WEFT_PROTO_GRPC_PCH_H_
#define WEFT_PROTO_GRPC_PCH_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "grpcpp/grpcpp.h"
#include "weft/v1/adapters.pb.h"
#include "weft/v1/sampling.pb.h"
#include "weft/v1/server.pb.h"
#include "weft/v1/training.pb.h"

#endif  // WEFT_PROTO_GRPC_PCH_H_
