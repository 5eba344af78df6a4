// SPDX-License-Identifier: Apache-2.0

package s3

import (
	"context"
	"fmt"
	"net/url"
	"strings"
	"time"

	"github.com/kvasir-kv/kvasir/internal/http1"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/s3/aws"
)

// page is a part of a list.
type page struct {
	IsTruncated           bool
	NextContinuationToken string
	EncodingType          string // of the keys
	Contents              []struct {
		Key          string
		Size         int64
		LastModified time.Time
	}
}

// List implements tier.Lister for the native layout: names in LMCache's layout do not contain
// the namespace. A HEAD for each object gets its checksum.
func (t *Tier) List(ctx context.Context, f func(kv.Key, tier.Meta) bool) error {
	return t.pages(ctx, func(p *page) (more bool, _ error) { return t.listPage(ctx, p, f) })
}

// Hottest implements tier.Ranking for the native layout. It ranks by the last write, since S3 does not tell what
// was read.
func (t *Tier) Hottest(ctx context.Context, n int, f func(kv.Key, tier.Meta) bool) error {
	hot := tier.NewHot(n)
	err := t.pages(ctx, func(p *page) (more bool, _ error) {
		for _, c := range p.Contents {
			if k, ok := t.keyOf(c.Key); ok && c.Size > 0 {
				hot.Add(k, c.LastModified.UnixMilli())
			}
		}
		return true, nil
	})
	if err != nil {
		return err
	}
	return hot.Each(ctx, t, f)
}

// pages calls f with each page of the list until f returns false.
func (t *Tier) pages(ctx context.Context, f func(p *page) (more bool, _ error)) error {
	if t.o.Layout != Native {
		return tier.ErrNoList
	}
	return t.allPages(ctx, f)
}

// RemoveIf implements tier.Emptying. In LMCache's layout it also removes objects that LMCache servers wrote, if f accepts them.
func (t *Tier) RemoveIf(ctx context.Context, f func(tier.Content) bool, pace tier.Pace) (removed int, err error) {
	err = t.allPages(ctx, func(p *page) (bool, error) {
		var names []string
		for _, c := range p.Contents {
			if content, ok := t.contentOf(c.Key); ok && f(content) {
				names = append(names, c.Key)
			}
		}
		n, err := tier.RemoveNamed(ctx, names, pace, func(part []string) error {
			return spread(ctx, t.o.Lookups, len(part), func(ctx context.Context, i int) error { return t.deleteNamed(ctx, part[i]) })
		})
		removed += n
		return true, err
	})
	return removed, err
}

// contentOf returns the object that has this name.
func (t *Tier) contentOf(name string) (tier.Content, bool) {
	if t.o.Layout == Native {
		k, ok := t.keyOf(name)
		return tier.Content{Key: k}, ok
	}
	inner, ok := strings.CutPrefix(name, t.o.Prefix)
	if !ok {
		return tier.Content{}, false
	}
	n, k, ok := tier.ParseLMCache(inner)
	return tier.Content{Key: k, Model: n.Model}, ok
}

func (t *Tier) allPages(ctx context.Context, f func(p *page) (more bool, _ error)) error {
	seen := map[string]bool{"": true} // continuation tokens
	for token := ""; ; {
		// Without an encoding, one foreign object with a control character in its name would make the whole page unreadable.
		query := map[string]string{"list-type": "2", "prefix": t.o.Prefix, "encoding-type": "url"}
		if token != "" {
			query["continuation-token"] = token
		}
		var p page
		err := t.do(ctx, &request{kind: kindList, query: aws.Query(query)}, func(a *http1.Response) error {
			p = page{}
			return document(a, "ListBucketResult", &p)
		})
		if err != nil {
			return err
		}
		p.decode()
		if more, err := f(&p); err != nil || !more {
			return err
		}
		if !p.IsTruncated {
			return nil
		}
		if token = p.NextContinuationToken; seen[token] {
			return fmt.Errorf("%w: the list of objects repeats a page", errAnswer)
		}
		seen[token] = true
	}
}

// decode decodes the keys if the store says that it encoded them. Some stores do not encode.
func (p *page) decode() {
	if p.EncodingType != "url" {
		return
	}
	for i := range p.Contents {
		if key, err := url.QueryUnescape(p.Contents[i].Key); err == nil {
			p.Contents[i].Key = key
		}
	}
}

func (t *Tier) listPage(ctx context.Context, p *page, f func(kv.Key, tier.Meta) bool) (more bool, _ error) {
	var keys []kv.Key
	for _, c := range p.Contents {
		if k, ok := t.keyOf(c.Key); ok && c.Size > 0 { // objects of other programs are skipped
			keys = append(keys, k)
		}
	}
	metas := make([]tier.Meta, len(keys))
	if err := t.Stat(ctx, keys, metas); err != nil {
		return false, err
	}
	for i, m := range metas {
		if m.Len > 0 && !f(keys[i], m) {
			return false, nil
		}
	}
	return true, nil
}
