// Opens the client's channel to its server: plaintext, TLS or mutual TLS.
#ifndef WEFT_CLIENT_CHANNEL_H_
#define WEFT_CLIENT_CHANNEL_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "grpcpp/grpcpp.h"

namespace weft::client {

// If all fields are empty, the channel is plaintext, for loopback.
struct Security {
  // Sent as `authorization: Bearer ...` with every call. Empty: no token.
  std::string token = {};
  // Uses TLS with the system's authorities. The next two fields imply TLS.
  bool tls = false;
  std::string root_certificates = {};  // PEM, instead of the system's
                                       // authorities.
  std::string certificate = {};        // PEM. If `private_key` is set too, TLS
                                       // is mutual.
  std::string private_key = {};
  // The name in the server's certificate. Empty: the target's host.
  std::string server_name = {};

  [[nodiscard]] bool UsesTls() const {
    return tls || !root_certificates.empty() || !certificate.empty();
  }
};

// Returns whether the target is on this machine, so that plaintext stays
// private: 127.0.0.0/8, [::1], localhost, unix:PATH.
[[nodiscard]] bool IsLocalTarget(absl::string_view target);

// Opens a channel, which connects at the first call. Errors:
// FAILED_PRECONDITION if a token would leave the machine in plaintext;
// INVALID_ARGUMENT for a certificate without its key, or a key without its
// certificate.
[[nodiscard]] absl::StatusOr<std::shared_ptr<grpc::Channel>> OpenChannel(
    const std::string& target, const Security& security);

}  // namespace weft::client

#endif  // WEFT_CLIENT_CHANNEL_H_
