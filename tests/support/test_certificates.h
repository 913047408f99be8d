// Makes certificates for tests of TLS.
#ifndef WEFT_TESTS_SUPPORT_TEST_CERTIFICATES_H_
#define WEFT_TESTS_SUPPORT_TEST_CERTIFICATES_H_

#include <string>

namespace weft {

// A certificate and its key, both as PEM.
struct Identity {
  std::string certificate;
  std::string key;
};

// Makes a self-signed certificate that may sign others.
[[nodiscard]] Identity MakeAuthority(const std::string& name);

// Makes a certificate for 127.0.0.1 and localhost, valid for `days` from now.
// If `days` is negative, the certificate was valid until now.
[[nodiscard]] Identity MakeIdentity(const Identity& authority,
                                    const std::string& name, int days = 1);

}  // namespace weft

#endif  // WEFT_TESTS_SUPPORT_TEST_CERTIFICATES_H_
