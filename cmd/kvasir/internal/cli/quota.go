// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"time"

	"github.com/kvasir-kv/kvasir/server/admin"
	"github.com/kvasir-kv/kvasir/store/evict"
	"github.com/kvasir-kv/kvasir/store/tenant"
)

// tenantBook stores the settings that the flags about tenants make.
type tenantBook interface {
	SetQuota(salt string, bytes int64) error
	SetTTL(salt string, ttl time.Duration) error
	SetPinLimit(salt string, bytes int64) error
}

// setTenants stores the settings of --quota, --tenant-ttl and --pin-limit in book.
func (c *serverCmd) setTenants(book tenantBook) error {
	bytes := func(set func(string, int64) error) func(string, string) error {
		return func(salt, text string) error {
			var size gibSize
			if err := size.UnmarshalText([]byte(text)); err != nil {
				return err
			}
			return set(salt, int64(size))
		}
	}
	if err := admin.EachSalt("--quota", "20GiB", c.Quota, bytes(book.SetQuota)); err != nil {
		return err
	}
	if err := admin.EachSalt("--pin-limit", "20GiB", c.PinLimit, bytes(book.SetPinLimit)); err != nil {
		return err
	}
	return admin.EachSalt("--tenant-ttl", "24h", c.OwnTTL, func(salt, text string) error {
		ttl, err := admin.ParseTTL(text)
		if err != nil {
			return err
		}
		return book.SetTTL(salt, ttl)
	})
}

// checkTenants returns an error for invalid settings of tenants. pool is the size of the pool in bytes.
func (c *serverCmd) checkTenants(pool int64) error {
	if c.TTL != 0 && c.TTL < 1 {
		return fmt.Errorf("--ttl-seconds %v is neither 0 (no limit) nor at least 1", c.TTL)
	}
	return c.setTenants(tenant.New(pool, nil, func(int64) evict.Policy { return nil }, nil, nil))
}
