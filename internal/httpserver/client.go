// SPDX-License-Identifier: Apache-2.0

package httpserver

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
)

// ClientFiles names PEM files with the authorities that a client trusts over https, and with its own certificate.
type ClientFiles struct {
	CA        string // authorities of the servers; empty: the system's
	Cert, Key string // of the client; read again when they change; empty: none
}

// TLS returns the TLS configuration of a client with these files; nil: Go's default.
func (f ClientFiles) TLS() (*tls.Config, error) {
	if f == (ClientFiles{}) {
		return nil, nil
	}
	c := &tls.Config{MinVersion: tls.VersionTLS12}
	if f.CA != "" {
		text, err := os.ReadFile(f.CA)
		if err != nil {
			return nil, err
		}
		c.RootCAs = x509.NewCertPool()
		if !c.RootCAs.AppendCertsFromPEM(text) {
			return nil, fmt.Errorf("%s has no certificate in PEM", f.CA)
		}
	}
	if (f.Cert == "") != (f.Key == "") {
		return nil, errors.New("the certificate of a client and its key go together")
	}
	if f.Cert != "" {
		pair, err := OpenCertificate(f.Cert, f.Key)
		if err != nil {
			return nil, err
		}
		c.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return pair.Get(nil) }
	}
	return c, nil
}
