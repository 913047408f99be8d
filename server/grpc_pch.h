// Precompiled for the files of server/ and its tests: gRPC's headers cost most
// of their compile time.
#ifndef WEFT_SERVER_GRPC_PCH_H_
#define WEFT_SERVER_GRPC_PCH_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "grpcpp/grpcpp.h"

#endif  // WEFT_SERVER_GRPC_PCH_H_
