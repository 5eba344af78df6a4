// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"

	"github.com/kvasir-kv/kvasir/internal/httpserver"
	"github.com/kvasir-kv/kvasir/mooncake/bootstrap"
)

// registryFlags are the credentials that a registry may demand from its clients.
type registryFlags struct {
	RegistryToken string `name:"registry-token" help:"Token that the registry wants (kvasir bootstrap --token or --token-file); best in the environment, as KVASIR_RELAY_REGISTRY_TOKEN, since other users see command lines." placeholder:"TOKEN" group:"Registry"`
	RegistryCA    string `name:"registry-tls-ca" help:"Authorities (PEM) of a registry at https, instead of the system's." placeholder:"FILE" group:"Registry"`
	RegistryCert  string `name:"registry-tls-cert" help:"Certificate (PEM) to show to the registry, read again when it changes." placeholder:"FILE" group:"Registry"`
	RegistryKey   string `name:"registry-tls-key" help:"Its key (PEM)." placeholder:"FILE" group:"Registry"`
}

// client returns the options of a client of a registry.
func (f *registryFlags) client() (bootstrap.ClientOptions, error) {
	own, err := httpserver.ClientFiles{CA: f.RegistryCA, Cert: f.RegistryCert, Key: f.RegistryKey}.TLS()
	if err != nil {
		err = fmt.Errorf("--registry-tls-ca, --registry-tls-cert, --registry-tls-key: %w", err)
	}
	return bootstrap.ClientOptions{Token: f.RegistryToken, TLS: own}, err
}
