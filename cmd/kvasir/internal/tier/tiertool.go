// SPDX-License-Identifier: Apache-2.0

// Package tier is kvasir tier. It shows, checks, empties and copies the tiers below a pool, whether a server runs or not.
package tier

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/kvasir-kv/kvasir/internal/safelog"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/adapter"
	"github.com/kvasir-kv/kvasir/tier/fs"
	"github.com/kvasir-kv/kvasir/tier/seal"
)

// With opens a tier, calls f with it, and closes it. text is TYPE:PATH, or the JSON of an --l2-adapter.
func With(text string, keys seal.Source, log *slog.Logger, f func(tier.Tier) error) error {
	return withTier(text, adapter.Options{Names: tier.NewNames(), Log: log, Existing: true, Keys: keys}, f)
}

func withTier(text string, o adapter.Options, f func(tier.Tier) error) error {
	t, err := adapter.OpenOne(text, o)
	if err != nil {
		return fmt.Errorf("%s: %s", adapter.Text(text), strings.ReplaceAll(err.Error(), "\n", "; "))
	}
	return errors.Join(f(t), t.Close())
}

// CopyBetween opens two tiers, copies from the first to the second as Copy does, and closes them. It makes the second tier if that does
// not exist.
func CopyBetween(ctx context.Context, r CopyReport, log *slog.Logger, keys seal.Source, from, to string) error {
	names := tier.NewNames()
	return withTier(from, adapter.Options{Names: names, Log: log, Existing: true, Keys: keys}, func(a tier.Tier) error {
		return withTier(to, adapter.Options{Names: names, Log: log, Keys: keys}, func(b tier.Tier) error { return Copy(ctx, r, a, b, names) })
	})
}

// Entry is one object of a tier.
type Entry struct {
	Name   string // the object's name in that tier
	Object tier.Name
	Key    kv.Key
	Meta   tier.Meta // the length is 0 if the object is torn
	Bytes  int64     // how much the object takes in the tier
}

// Torn reports whether the object is incomplete.
func (e *Entry) Torn() bool { return e.Meta.Len == 0 }

// each calls f with each object of a tier. It stops at the first error of f, and returns that error.
func each(ctx context.Context, t tier.Tier, f func(Entry) error) error {
	var failed error
	note := func(e Entry) bool {
		failed = f(e)
		return failed == nil
	}
	var err error
	switch t := t.(type) {
	case *fs.Dir:
		err = t.Files(ctx, func(file fs.File) bool {
			return note(Entry{Name: file.Name, Object: file.Object, Key: file.Key, Meta: file.Meta, Bytes: file.Size})
		})
	case tier.Lister:
		err = t.List(ctx, func(k kv.Key, m tier.Meta) bool {
			return note(Entry{Name: k.String(), Key: k, Meta: m, Bytes: m.Len})
		})
	default:
		err = tier.ErrNoList
	}
	return errors.Join(failed, err)
}

// group identifies the objects that List counts in one line.
type group struct {
	object    tier.Name
	namespace kv.Namespace
	rank      kv.Rank
	group     uint32
}

type sums struct{ objects, bytes, unsummed, torn int64 }

func (s *sums) add(e *Entry) {
	s.objects++
	s.bytes += e.Bytes
	switch {
	case e.Torn():
		s.torn++
	case e.Meta.NoSum:
		s.unsummed++
	}
}

// List writes what a tier has: a line for each model, shard and object group. If all is true, it writes a line for each object instead.
func List(ctx context.Context, w io.Writer, t tier.Tier, all bool) error {
	groups, total := make(map[group]*sums), sums{}
	out := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	if all {
		fmt.Fprintln(out, "BYTES\tCHECKSUM\tNAME")
	}
	err := each(ctx, t, func(e Entry) error {
		total.add(&e)
		if all {
			sum := fmt.Sprintf("%016x", e.Meta.Sum)
			switch {
			case e.Torn():
				sum = "torn"
			case e.Meta.NoSum:
				sum = "none"
			}
			fmt.Fprintf(out, "%d\t%s\t%s\n", e.Bytes, sum, printable(e.Name))
			return nil
		}
		g := group{e.Object, e.Key.Namespace, e.Key.Rank, e.Key.Group}
		if groups[g] == nil {
			groups[g] = &sums{}
		}
		groups[g].add(&e)
		return nil
	})
	if err != nil {
		return err
	}
	if !all && len(groups) > 0 {
		fmt.Fprintln(out, "MODEL\tSALT\tLAYOUT\tSHARD\tGROUP\tCHUNKS\tBYTES\tNO CHECKSUM\tTORN")
		for _, g := range slices.SortedFunc(maps.Keys(groups), compareGroups) {
			s := groups[g]
			layout := "not known"
			if g.namespace != (kv.Namespace{}) {
				layout = g.namespace.String()[:8]
			}
			fmt.Fprintf(out, "%s\t%s\t%s\t%d of %d\t%d\t%d\t%s\t%d\t%d\n", orDash(g.object.Model), orDash(g.object.Salt), layout, g.rank>>16&0xff, g.rank>>24, g.group,
				s.objects, kv.FormatBytes(s.bytes), s.unsummed, s.torn)
		}
	}
	if err := out.Flush(); err != nil {
		return err
	}
	_, err = fmt.Fprintf(w, "%d objects, %s, %d without a checksum, %d torn%s\n", total.objects, kv.FormatBytes(total.bytes), total.unsummed, total.torn, space(t))
	return err
}

func compareGroups(a, b group) int {
	key := func(g group) string {
		return fmt.Sprintf("%s@%s@%s@%08x@%08x", g.object.Model, g.object.Salt, g.namespace, uint32(g.rank), g.group)
	}
	return strings.Compare(key(a), key(b))
}

// space says how many bytes are free in the tier; empty: not known.
func space(t tier.Tier) string {
	if s, ok := t.(tier.Sized); ok {
		if free := s.Space().Free; free >= 0 {
			return fmt.Sprintf("; %s are free there", kv.FormatBytes(free))
		}
	}
	return ""
}

func orDash(s string) string {
	if s == "" {
		return "-"
	}
	return printable(s)
}

// printable makes a name safe for a terminal.
func printable(s string) string { return safelog.Text(s, 1024) }

var (
	// ErrDamaged means that the content of some objects is not what was written.
	ErrDamaged = errors.New("damaged objects were found")

	// ErrUnread means that some objects could not be read now. Whether they are damaged is not known.
	ErrUnread = errors.New("not all objects could be read")

	// ErrNotTaken means that the target of a copy refused some objects.
	ErrNotTaken = errors.New("the target did not store all objects")
)

// Verify reads every object that has a checksum and compares the content with it. If remove is true, it deletes the objects that are
// torn or differ. Objects that cannot be read now stay. Errors: ErrDamaged if objects are damaged, ErrUnread if some could not be read.
func Verify(ctx context.Context, w io.Writer, t tier.Tier, remove bool) error {
	n, err := verify(ctx, t, remove, func(name, why string, read bool) {
		if !read {
			why = "not read: " + why
		}
		fmt.Fprintf(w, "%s: %s\n", printable(name), printable(why))
	})
	if err != nil {
		return err
	}
	fmt.Fprintf(w, "%d objects are as they were written, %d have no checksum, %d are damaged, %d of them were removed, %d could not be read\n", n.Good, n.Unsummed, n.Damaged, n.Removed, n.Unread)
	return n.err()
}

// verified counts objects by the result of Verify.
type verified struct {
	Good     int64 `json:"good"`
	Unsummed int64 `json:"without_checksum"`
	Damaged  int64 `json:"damaged"`
	Removed  int64 `json:"removed"`
	Unread   int64 `json:"not_read"`
}

func (n *verified) err() error {
	return errors.Join(errorOfObjects(ErrDamaged, n.Damaged-n.Removed), errorOfObjects(ErrUnread, n.Unread))
}

// verify does the work of Verify. It calls fault for each object that is damaged (`read` is true) or could not be read (`read` is false).
// why is the reason.
func verify(ctx context.Context, t tier.Tier, remove bool, fault func(name, why string, read bool)) (n verified, _ error) {
	var buf []byte
	err := each(ctx, t, func(e Entry) error {
		why := ""
		switch {
		case e.Torn():
			why = "torn"
		case e.Meta.NoSum:
			n.Unsummed++
			return nil
		default:
			buf = grown(buf, e.Meta.Len)
			m, err := t.Read(ctx, e.Key, buf)
			if ctx.Err() != nil {
				return ctx.Err()
			}
			sum := xxh3.Hash(buf)
			switch {
			case errors.Is(err, tier.ErrMissing): // the object went meanwhile
				return nil
			case err != nil && !isCorrupt(err):
				n.Unread++
				fault(e.Name, err.Error(), false)
				return nil
			case err != nil:
				why = err.Error()
			case m.Sum != sum:
				why = fmt.Sprintf("checksum %016x, want %016x", sum, m.Sum)
			}
		}
		if why == "" {
			n.Good++
			return nil
		}
		n.Damaged++
		fault(e.Name, why, true)
		if !remove {
			return nil
		}
		if err := discard(ctx, t, &e); err != nil {
			return err
		}
		n.Removed++
		return nil
	})
	return n, err
}

// isCorrupt reports whether an error says that an object was read, and that its content is not what was written.
func isCorrupt(err error) bool {
	_, ok := errors.AsType[*tier.CorruptError](err)
	return ok
}

// errorOfObjects returns err with the number of objects that it concerns; nil if n is 0.
func errorOfObjects(err error, n int64) error {
	if n == 0 {
		return nil
	}
	return fmt.Errorf("%w: %d", err, n)
}

// grown returns a buffer of n bytes: b if its capacity suffices, else a new one.
func grown(b []byte, n int64) []byte {
	if int64(cap(b)) < n {
		return make([]byte, n)
	}
	return b[:n]
}

// discard removes one object, also if it is torn or damaged.
func discard(ctx context.Context, t tier.Tier, e *Entry) error {
	if d, ok := t.(*fs.Dir); ok {
		return d.Discard(e.Name)
	}
	return t.Delete(ctx, []kv.Key{e.Key})
}

// Filter says which objects Drop removes. An object must match all three fields.
type Filter struct {
	Model string // in any revision and generation; empty: all models
	Salt  string // empty: all salts
	Torn  bool   // torn objects only
}

// ErrNoModels means that a tier does not know which model its objects belong to.
var ErrNoModels = errors.New("this place knows no models and salts: give --all")

// dropped says how much Drop removed.
type dropped struct {
	Objects int64  `json:"removed"`
	Bytes   *int64 `json:"bytes,omitempty"` // nil: not known
}

// Drop removes the objects that the filter names, and writes how many there were.
func Drop(ctx context.Context, w io.Writer, t tier.Tier, f Filter) error {
	n, err := drop(ctx, t, f)
	if err != nil {
		return err
	}
	size := ""
	if n.Bytes != nil {
		size = ", " + kv.FormatBytes(*n.Bytes)
	}
	_, err = fmt.Fprintf(w, "removed %d objects%s. A server that runs finds out when it reads them next\n", n.Objects, size)
	return err
}

// DropJSON does what Drop does, and writes the result as one JSON object.
func DropJSON(ctx context.Context, w io.Writer, t tier.Tier, f Filter) error {
	n, err := drop(ctx, t, f)
	if err != nil {
		return err
	}
	return json.NewEncoder(w).Encode(n)
}

func drop(ctx context.Context, t tier.Tier, f Filter) (n dropped, _ error) {
	if s, ok := t.(interface{ Below() tier.Tier }); ok { // so objects that cannot be decrypted are removed too
		t = s.Below()
	}
	_, named := t.(*fs.Dir)
	if e, ok := t.(tier.Emptying); ok && !named && !f.Torn && f.Salt == "" {
		return empty(ctx, e, f.Model)
	}
	if !named && (f.Model != "" || f.Salt != "") {
		return n, ErrNoModels
	}
	n.Bytes = new(int64)
	err := each(ctx, t, func(e Entry) error {
		if f.Model != "" && !tier.IsOf(e.Object.Model, f.Model) || f.Salt != "" && e.Object.Salt != f.Salt || f.Torn && !e.Torn() {
			return nil
		}
		if err := discard(ctx, t, &e); err != nil {
			return err
		}
		n.Objects++
		*n.Bytes += e.Bytes
		return nil
	})
	return n, err
}

// empty removes all objects of a tier or, if model is not empty, those of this model. It returns ErrNoModels if the tier does not name
// its objects by models.
func empty(ctx context.Context, t tier.Emptying, model string) (dropped, error) {
	unnamed := false
	n, err := t.RemoveIf(ctx, func(c tier.Content) bool {
		unnamed = unnamed || c.Model == ""
		return model == "" || tier.IsOf(c.Model, model)
	}, func(ctx context.Context, _ int) error { return ctx.Err() })
	if err == nil && unnamed && model != "" {
		err = ErrNoModels
	}
	return dropped{Objects: int64(n)}, err
}

// progressInterval is the time between two reports of a copy's progress.
const progressInterval = 10 * time.Second

// copying counts what a copy did.
type copying struct {
	Copied   int64 `json:"copied"`
	Bytes    int64 `json:"bytes"`
	There    int64 `json:"there"` // were in the target before
	Unsummed int64 `json:"torn_or_without_checksum"`
	Damaged  int64 `json:"damaged"`
	Unread   int64 `json:"not_read"`
	Refused  int64 `json:"not_taken"`
}

func (c *copying) String() string {
	return fmt.Sprintf("copied %d objects, %s; %d were there; left out: %d torn or without a checksum, %d damaged, %d not read, %d not taken",
		c.Copied, kv.FormatBytes(c.Bytes), c.There, c.Unsummed, c.Damaged, c.Unread, c.Refused)
}

// CopyReport receives what a copy reports.
type CopyReport struct {
	unread func(name, why string)      // called for each object that could not be read
	so     func(n *copying, done bool) // called with the figures so far; done is true at the end
}

// CopyText returns a CopyReport that writes sentences.
func CopyText(w io.Writer) CopyReport {
	return CopyReport{
		unread: func(name, why string) { fmt.Fprintf(w, "%s: not read: %s\n", printable(name), printable(why)) },
		so: func(n *copying, done bool) {
			if !done {
				fmt.Fprint(w, "so far: ")
			}
			fmt.Fprintln(w, n)
		},
	}
}

// CopyJSON returns a CopyReport that writes a line of JSON for each object that was not read, and one for each report of the figures.
func CopyJSON(w io.Writer) CopyReport {
	out := json.NewEncoder(w)
	return CopyReport{
		unread: func(name, why string) {
			_ = out.Encode(struct {
				Name string `json:"name"`
				Why  string `json:"why"`
			}{name, why})
		},
		so: func(n *copying, done bool) {
			_ = out.Encode(struct {
				*copying
				Done bool `json:"done"`
			}{n, done})
		},
	}
}

// Copy writes every object that has a checksum from one tier to another. It compares the content with the checksum before it writes,
// and skips damaged objects. It does not read objects that the target has already, so a copy that was interrupted can be started again.
// It adds the names of the objects to names. Errors: ErrUnread if objects could not be read, ErrNotTaken if the target refused some.
func Copy(ctx context.Context, r CopyReport, from, to tier.Tier, names *tier.Names) error {
	if d, ok := to.(*fs.Dir); ok {
		if err := d.Ready(ctx); err != nil {
			return err
		}
	}
	var n copying
	var buf []byte
	printed := time.Now()
	err := each(ctx, from, func(e Entry) error {
		if time.Since(printed) >= progressInterval {
			printed = time.Now()
			r.so(&n, false)
		}
		if e.Torn() || e.Meta.NoSum {
			n.Unsummed++
			return nil
		}
		if e.Object.Model != "" {
			names.Add(e.Key.Namespace, e.Object.Model, []byte(e.Object.Salt))
		}
		if isThere(ctx, to, &e) {
			n.There++
			return nil
		}
		buf = grown(buf, e.Meta.Len)
		m, err := from.Read(ctx, e.Key, buf)
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.Is(err, tier.ErrMissing):
			return nil
		case err != nil && !isCorrupt(err):
			n.Unread++
			r.unread(e.Name, err.Error())
			return nil
		case err != nil || m.Sum != xxh3.Hash(buf):
			n.Damaged++
			return nil
		}
		err = to.Write(ctx, e.Key, m, buf)
		if errors.Is(err, tier.ErrNotKept) { // the tier may take an object at its second write
			err = to.Write(ctx, e.Key, m, buf)
		}
		switch {
		case errors.Is(err, tier.ErrNotKept):
			n.Refused++
			return nil
		case err != nil:
			return err
		}
		n.Copied++
		n.Bytes += m.Len
		return nil
	})
	r.so(&n, err == nil)
	return errors.Join(err, errorOfObjects(ErrUnread, n.Unread), errorOfObjects(ErrNotTaken, n.Refused))
}

// isThere reports whether a tier has the object with the same length and the same checksum. The checksum is not compared if the tier
// keeps none. It returns false if the tier does not answer.
func isThere(ctx context.Context, t tier.Tier, e *Entry) bool {
	metas := make([]tier.Meta, 1)
	err := t.Stat(ctx, []kv.Key{e.Key}, metas)
	return err == nil && metas[0].Len == e.Meta.Len && (metas[0].NoSum || metas[0].Sum == e.Meta.Sum)
}
