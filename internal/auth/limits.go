// SPDX-License-Identifier: Apache-2.0

package auth

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"os/user"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
)

// Kinds of subjects.
const (
	KindListener = "listener" // a listener, by its name
	KindUser     = "user"     // a user of this host, by its number; empty: the user is not known
	KindKey      = "key"      // a client of CURVE, by its name
	KindToken    = "token"    // an entry of a file of tokens, by its name
	KindCert     = "cert"     // a client certificate, by its subject
)

var kinds = []string{KindListener, KindUser, KindKey, KindToken, KindCert}

// Subject is something by which a client is limited: its listener, its user, or a credential.
type Subject struct{ Kind, Name string }

// allOthers is the name that stands for all subjects of a kind without a line.
const allOthers = "*"

// tenantSet are the tenants of a line.
type tenantSet struct {
	all bool
	of  map[string]bool
}

// Limits of a file of tenants.
const (
	MaxLimitFile = 1 << 20 // bytes
	maxLimits    = 4096    // lines
	maxTenants   = 1024    // of a line
)

// TenantLimits say which tenants the clients of a server may use. The methods are safe for concurrent use. A nil *TenantLimits limits
// no client.
type TenantLimits struct {
	saltOf func(name string) string
	file   *File
	all    atomic.Pointer[map[Subject]*tenantSet]
}

// OpenTenantLimits reads a file: on each line a kind, a name, and one tenant or more, blanks in them as %20. The name * stands for all
// subjects of the kind without a line, the tenant * for all tenants, - for none. Empty lines and lines that begin with # mean nothing. Every
// user may read the file, and only its owner and group may write it. saltOf returns the salt that a tenant's name stands for.
func OpenTenantLimits(path string, saltOf func(name string) string) (*TenantLimits, error) {
	l := &TenantLimits{saltOf: saltOf}
	l.all.Store(&map[Subject]*tenantSet{})
	var err error
	if l.file, err = OpenFile(FileOptions{Path: path, MaxBytes: MaxLimitFile, Public: true, Parse: l.parse}); err != nil {
		return nil, fmt.Errorf("limits of tenants: %w", err)
	}
	return l, nil
}

// Watch reads the file again when it changes, until ctx ends.
func (l *TenantLimits) Watch(ctx context.Context, log *slog.Logger) {
	l.file.Watch(ctx, WatchInterval, log)
}

// Reload reads the file now and puts it into use. Unlike Watch it does not check whether the file is being written.
func (l *TenantLimits) Reload() error {
	c, _, _, err := l.file.load()
	if err != nil {
		return err
	}
	c.Take()
	return nil
}

func (l *TenantLimits) parse(text []byte) (Change, error) {
	all := map[Subject]*tenantSet{}
	lines := bufio.NewScanner(bytes.NewReader(text))
	lines.Buffer(nil, MaxLimitFile)
	for n := 1; lines.Scan(); n++ {
		words := strings.Fields(lines.Text())
		if len(words) == 0 || strings.HasPrefix(words[0], "#") {
			continue
		}
		s, set, err := l.parseLine(words)
		switch {
		case err != nil:
			return Change{}, fmt.Errorf("line %d: %w", n, err)
		case all[s] != nil:
			return Change{}, fmt.Errorf("line %d: %s %.64q has a line already", n, s.Kind, s.Name)
		case len(all) == maxLimits:
			return Change{}, fmt.Errorf("more than %d lines", maxLimits)
		}
		all[s] = set
	}
	removed := 0
	for s := range *l.all.Load() {
		if all[s] == nil {
			removed++
		}
	}
	return Change{Take: func() { l.all.Store(&all) }, Entries: len(all), Removed: removed}, lines.Err()
}

func (l *TenantLimits) parseLine(words []string) (s Subject, _ *tenantSet, err error) {
	if len(words) < 3 || !slices.Contains(kinds, words[0]) {
		return s, nil, fmt.Errorf("want KIND NAME TENANT..., a kind of %s", strings.Join(kinds, ", "))
	}
	s.Kind = words[0]
	if s.Name, err = url.PathUnescape(words[1]); err != nil || s.Name == "" {
		return s, nil, fmt.Errorf("%.80q is no name", words[1])
	}
	switch {
	case s.Kind == KindListener && words[1] == allOthers:
		return s, nil, fmt.Errorf("a listener has a name, such as zmq or http")
	case s.Kind == KindUser && words[1] != allOthers:
		if s.Name, err = userNumber(s.Name); err != nil {
			return s, nil, err
		}
	}
	if len(words)-2 > maxTenants {
		return s, nil, fmt.Errorf("more than %d tenants", maxTenants)
	}
	set := &tenantSet{of: map[string]bool{}}
	for _, w := range words[2:] {
		switch name, err := url.PathUnescape(w); {
		case err != nil || len(name) > 4*maxName:
			return s, nil, fmt.Errorf("%.80q is no tenant", w)
		case w == allOthers:
			set.all = true
		case w == "-" && len(words) == 3:
		case w == "-":
			return s, nil, fmt.Errorf("- means no tenant, and stands alone")
		default:
			set.of[l.saltOf(name)] = true
		}
	}
	return s, set, nil
}

// userNumber returns the number of a user given by name or number.
func userNumber(name string) (string, error) {
	if n, err := strconv.ParseUint(name, 10, 32); err == nil {
		return strconv.FormatUint(n, 10), nil
	}
	u, err := user.Lookup(name)
	if err != nil {
		return "", fmt.Errorf("user %.64q is not known here: give its number", name)
	}
	return u.Uid, nil
}

// Has reports whether there is a line of a kind.
func (l *TenantLimits) Has(kind string) bool {
	for s := range *l.all.Load() {
		if s.Kind == kind {
			return true
		}
	}
	return false
}

// For returns the limit of a client with all of these subjects; nil: it may use every tenant.
func (l *TenantLimits) For(subjects ...Subject) *Limit {
	if l == nil {
		return nil
	}
	return &Limit{l, subjects}
}

// Limit says which tenants one client may use. It follows changes of the file. The methods are safe for concurrent use. A nil *Limit allows
// all.
type Limit struct {
	limits   *TenantLimits
	subjects []Subject
}

// setOf returns the tenants of a subject; nil: all of them.
func setOf(all map[Subject]*tenantSet, s Subject) *tenantSet {
	if set := all[s]; set != nil {
		return set
	}
	return all[Subject{s.Kind, allOthers}]
}

// Allows reports whether the client may use a tenant, by its salt.
func (l *Limit) Allows(salt string) bool {
	if l == nil {
		return true
	}
	all := *l.limits.all.Load()
	for _, s := range l.subjects {
		if set := setOf(all, s); set != nil && !set.all && !set.of[salt] {
			return false
		}
	}
	return true
}

// Limited reports whether there are tenants that the client may not use.
func (l *Limit) Limited() bool {
	if l == nil {
		return false
	}
	all := *l.limits.all.Load()
	return slices.ContainsFunc(l.subjects, func(s Subject) bool { set := setOf(all, s); return set != nil && !set.all })
}

type limitKey struct{}

// limited is what the Gate in front adds to a request's context.
type limited struct {
	limit *Limit
	gate  *Gate
}

// LimitOf returns the limit of a request's client, from the Gate in front; nil: every tenant.
func LimitOf(r *http.Request) *Limit {
	if l, ok := r.Context().Value(limitKey{}).(limited); ok {
		return l.limit
	}
	return nil
}

// RefuseTenant answers a request of a limited client about a tenant that it may not use, or about all tenants. The Gate counts it.
func RefuseTenant(w http.ResponseWriter, r *http.Request, text string) {
	if l, ok := r.Context().Value(limitKey{}).(limited); ok {
		l.gate.badTenant.Add(1)
		l.gate.refuse(w, r, http.StatusForbidden, text)
	}
}

// UserSubject returns the subject of a user of this host. known is false if the user is not known.
func UserSubject(uid int, known bool) Subject {
	if !known {
		return Subject{Kind: KindUser}
	}
	return Subject{KindUser, strconv.Itoa(uid)}
}
