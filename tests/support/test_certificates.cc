#include "tests/support/test_certificates.h"

#include <openssl/bio.h>
#include <openssl/ec.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>

#include <algorithm>

namespace weft {
namespace {

constexpr long kDay = 24 * 3600;

std::string Drain(BIO* bio) {
  char* data = nullptr;
  const long size = BIO_get_mem_data(bio, &data);
  std::string text(data, static_cast<size_t>(size));
  BIO_free(bio);
  return text;
}

void Extend(X509* certificate, int nid, const char* value) {
  X509_EXTENSION* const extension =
      X509V3_EXT_conf_nid(nullptr, nullptr, nid, value);
  X509_add_ext(certificate, extension, -1);
  X509_EXTENSION_free(extension);
}

X509* NewCertificate(EVP_PKEY* key, const std::string& name, int days) {
  X509* const certificate = X509_new();
  X509_set_version(certificate, X509_VERSION_3);
  static long serial = 1;
  ASN1_INTEGER_set(X509_get_serialNumber(certificate), serial++);
  X509_gmtime_adj(X509_getm_notBefore(certificate),
                  std::min(0, days) * kDay - kDay);
  X509_gmtime_adj(X509_getm_notAfter(certificate),
                  days < 0 ? -kDay / 24 : days * kDay);
  X509_NAME_add_entry_by_txt(
      X509_get_subject_name(certificate), "CN", MBSTRING_ASC,
      reinterpret_cast<const unsigned char*>(name.c_str()), -1, -1, 0);
  X509_set_pubkey(certificate, key);
  return certificate;
}

// Returns the certificate and the key as PEM, and frees both.
Identity ToPem(X509* certificate, EVP_PKEY* key) {
  BIO* const certificate_bio = BIO_new(BIO_s_mem());
  PEM_write_bio_X509(certificate_bio, certificate);
  BIO* const key_bio = BIO_new(BIO_s_mem());
  PEM_write_bio_PrivateKey(key_bio, key, nullptr, nullptr, 0, nullptr, nullptr);
  X509_free(certificate);
  EVP_PKEY_free(key);
  return {Drain(certificate_bio), Drain(key_bio)};
}

}  // namespace

Identity MakeAuthority(const std::string& name) {
  EVP_PKEY* const key = EVP_EC_gen("P-256");
  X509* const certificate = NewCertificate(key, name, 1);
  X509_set_issuer_name(certificate, X509_get_subject_name(certificate));
  Extend(certificate, NID_basic_constraints, "critical,CA:TRUE");
  Extend(certificate, NID_key_usage, "keyCertSign,cRLSign");
  X509_sign(certificate, key, EVP_sha256());
  return ToPem(certificate, key);
}

Identity MakeIdentity(const Identity& authority, const std::string& name,
                      int days) {
  BIO* bio = BIO_new_mem_buf(authority.certificate.c_str(), -1);
  X509* const issuer = PEM_read_bio_X509(bio, nullptr, nullptr, nullptr);
  BIO_free(bio);
  bio = BIO_new_mem_buf(authority.key.c_str(), -1);
  EVP_PKEY* const issuer_key =
      PEM_read_bio_PrivateKey(bio, nullptr, nullptr, nullptr);
  BIO_free(bio);
  EVP_PKEY* const key = EVP_EC_gen("P-256");
  X509* const certificate = NewCertificate(key, name, days);
  X509_set_issuer_name(certificate, X509_get_subject_name(issuer));
  Extend(certificate, NID_subject_alt_name, "DNS:localhost,IP:127.0.0.1");
  X509_sign(certificate, issuer_key, EVP_sha256());
  X509_free(issuer);
  EVP_PKEY_free(issuer_key);
  return ToPem(certificate, key);
}

}  // namespace weft
