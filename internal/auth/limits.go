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

// The kinds of subjects.
const (
	KindListener = "listener" // a listener, named by its name
	KindUser     = "user"     // a user of this host, named by the user number; empty: the user is unknown
	KindKey      = "key"      // a client of CURVE, named by its name
	KindToken    = "token"    // an entry of a file of tokens, named by its name
	KindCert     = "cert"     // a client certificate, named by its subject
)

var kinds = []string{KindListener, KindUser, KindKey, KindToken, KindCert}

// Subject is a property of a client by which it can be limited: its listener, its user, or a credential.
type Subject struct{ Kind, Name string }

// allOthers is the name that stands for all subjects of a kind that have no line.
const allOthers = "*"

// tenantSet holds the tenants of one line.
type tenantSet struct {
	all bool
	of  map[string]bool
}

// Limits of a file of tenant limits. A file beyond one of them is refused as a whole; limits read before stay in force.
const (
	MaxLimitFile = 1 << 20 // bytes
	maxLimits    = 4096    // lines
	maxTenants   = 1024    // in one line
)

// TenantLimits says which tenants the clients of a server may use. Its methods are safe for concurrent use. A nil *TenantLimits limits
// no client.
type TenantLimits struct {
	saltOf func(name string) string
	file   *File
	all    atomic.Pointer[map[Subject]*tenantSet]
}

// OpenTenantLimits reads a file of tenant limits. Each line has a kind, a name, and one or more tenants; blanks in them are written as
// %20. The name * stands for all subjects of the kind without a line. The tenant * stands for all tenants, and - for none. Empty lines
// and lines that begin with # are skipped. Every user may be able to read the file, but only its owner and group may be able to write
// it. saltOf returns the salt for a tenant's name.
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

// Reload reads the file now and puts it into use. Unlike Watch, it does not check whether the file is being written.
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
		return s, nil, fmt.Errorf("%.80q is no name of such a kind", words[1])
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
			return s, nil, fmt.Errorf("- means no tenant, and must be the only word behind the name")
		default:
			set.of[l.saltOf(name)] = true
		}
	}
	return s, set, nil
}

// userNumber returns the number of a user who is given by name or by number.
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

// Has reports whether the file has a line for any subject of that kind.
func (l *TenantLimits) Has(kind string) bool {
	for s := range *l.all.Load() {
		if s.Kind == kind {
			return true
		}
	}
	return false
}

// For returns the limit of a client that has all these subjects. It returns nil, which means every tenant, only if l is nil.
func (l *TenantLimits) For(subjects ...Subject) *Limit {
	if l == nil {
		return nil
	}
	return &Limit{l, subjects}
}

// Limit says which tenants one client may use. It follows changes of the file. Its methods are safe for concurrent use. A nil *Limit
// allows all tenants.
type Limit struct {
	limits   *TenantLimits
	subjects []Subject
}

// setOf returns the tenants that a subject may use, by its own line in the file or by the line for all others of its kind; nil, without
// such a line, means all tenants. `all` has the lines.
func setOf(all map[Subject]*tenantSet, s Subject) *tenantSet {
	if set := all[s]; set != nil {
		return set
	}
	return all[Subject{s.Kind, allOthers}]
}

// Allows reports whether the client may use the tenant with that salt.
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

// limited is the value that the Gate adds to a request's context.
type limited struct {
	limit *Limit
	gate  *Gate
}

// LimitOf returns the limit of a request's client, which the Gate in front has found; nil: every tenant.
func LimitOf(r *http.Request) *Limit {
	if l, ok := r.Context().Value(limitKey{}).(limited); ok {
		return l.limit
	}
	return nil
}

// RefuseTenant answers 403 to a request of a limited client about a tenant that it may not use, or about all tenants. The Gate counts
// the refusal.
func RefuseTenant(w http.ResponseWriter, r *http.Request, text string) {
	if l, ok := r.Context().Value(limitKey{}).(limited); ok {
		l.gate.badTenant.Add(1)
		l.gate.refuse(w, r, http.StatusForbidden, text)
	}
}

// UserSubject returns the subject for the user of this host with the number uid. known is false if the user is unknown.
func UserSubject(uid int, known bool) Subject {
	if !known {
		return Subject{Kind: KindUser}
	}
	return Subject{KindUser, strconv.Itoa(uid)}
}
