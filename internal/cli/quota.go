package cli

import (
	"github.com/kvasir-kv/kvasir/admin"
	"github.com/kvasir-kv/kvasir/evict"
	"github.com/kvasir-kv/kvasir/tenants"
)

// setQuotas calls set for the tenants of --quota.
func (c *serverCmd) setQuotas(set func(salt string, bytes int64) error) error {
	return admin.SetQuotas(c.Quota, set, func(text []byte) (int64, error) {
		var size gibSize
		err := size.UnmarshalText(text)
		return int64(size), err
	})
}

// checkQuotas reports what is wrong with --quota for a pool of so many bytes.
func (c *serverCmd) checkQuotas(pool int64) error {
	return c.setQuotas(tenants.New(pool, nil, func(int64) evict.Policy { return nil }, nil, nil).SetQuota)
}
