// How a client reaches its server: plaintext, TLS or mutual TLS.
#ifndef WEFT_CLIENT_CHANNEL_H_
#define WEFT_CLIENT_CHANNEL_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "grpcpp/grpcpp.h"

namespace weft::client {

// All empty: plaintext, for loopback.
struct Security {
  // Sent as `authorization: Bearer ...` with every call; empty: none.
  std::string token = {};
  // Use TLS with the system's authorities. The next two fields imply it.
  bool tls = false;
  std::string root_certificates = {};  // PEM; instead of the system's.
  std::string certificate = {};        // PEM, with `private_key`: mutual TLS.
  std::string private_key = {};
  // The name in the server's certificate; empty: the target's host.
  std::string server_name = {};

  [[nodiscard]] bool UsesTls() const {
    return tls || !root_certificates.empty() || !certificate.empty();
  }
};

// Returns whether the target is on this machine, so that plaintext stays
// private: 127.0.0.0/8, [::1], localhost, unix:PATH.
[[nodiscard]] bool IsLocalTarget(absl::string_view target);

// Opens a channel; the first call connects.
// Errors: FAILED_PRECONDITION if a token would leave the machine in plaintext;
// INVALID_ARGUMENT for a certificate without its key, or a key without its
// certificate.
[[nodiscard]] absl::StatusOr<std::shared_ptr<grpc::Channel>> OpenChannel(
    const std::string& target, const Security& security);

}  // namespace weft::client

#endif  // WEFT_CLIENT_CHANNEL_H_
