// SPDX-License-Identifier: Apache-2.0

// Package metrics turns the Stats structs of packages into Prometheus samples. It is the only package that imports Prometheus: any
// other package only has a Stats method, and tags on the struct that it returns.
//
//	type Stats struct {
//		Lookups uint64            `counter:"kvasir_lookups_total" help:"Lookups."`
//		Bytes   int64             `gauge:"kvasir_bytes" help:"Bytes in use."`
//		Missed  map[string]uint64 `counter:"kvasir_missed_total" label:"reason" help:"Misses by reason."`
//		Slow    map[[2]string]int `gauge:"kvasir_slow" label:"model,tenant" help:"Slow ones."`
//		Full    float64           `gauge:"kvasir_full" always:"tier=ram" help:"Share in use."`
//		Took    histogram.Counts    `histogram:"kvasir_seconds" help:"Time of each."`
//	}
//
// Fields may be integers, floats, bools (0 or 1), durations (seconds) and histogram.Counts. They may also be maps to these types, from
// the value of a label, or from an array with the values of several labels. A map should contain all known label values from the start,
// so that a series exists before its first event. The tag `always` adds labels that are the same in all samples of a field. The fields
// of an embedded or nested struct without a tag are samples, too. Other fields without a tag are for Go callers only.
package metrics

import (
	"fmt"
	"io"
	"maps"
	"net/http"
	"reflect"
	"runtime"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/prometheus/common/expfmt"

	"github.com/kvasir-kv/kvasir/internal/histogram"
)

// Registry serves the metrics of one process.
type Registry struct{ reg *prometheus.Registry }

// New returns a Registry with the metrics of the Go runtime and of the process, and
// kvasir_build_info.
func New(version string) *Registry {
	r := &Registry{prometheus.NewRegistry()}
	info := prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "kvasir_build_info", Help: "The build that answers; always 1.",
		ConstLabels: prometheus.Labels{"version": version, "goversion": runtime.Version()},
	}, func() float64 { return 1 })
	r.reg.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}), info)
	return r
}

// Add adds the metrics of a package. stats must return its Stats struct; it is called at each scrape, possibly by several goroutines at
// a time.
func Add[T any](r *Registry, stats func() T) { AddWith(r, nil, stats) }

// AddWith is like Add, and adds the same labels to all samples of the package.
func AddWith[T any](r *Registry, labels map[string]string, stats func() T) {
	r.reg.MustRegister(newCollector(labels, reflect.TypeFor[T](), func() any { return stats() }))
}

// Handler answers GET /metrics.
func (r *Registry) Handler() http.Handler { return promhttp.HandlerFor(r.reg, promhttp.HandlerOpts{}) }

// Of returns a handler that answers GET /metrics with the metrics of one package only.
func Of[T any](stats func() T) http.Handler {
	r := &Registry{prometheus.NewRegistry()}
	Add(r, stats)
	return r.Handler()
}

// Write writes the samples of one Stats struct as text.
func Write(w io.Writer, stats any) error {
	reg := prometheus.NewPedanticRegistry()
	if err := reg.Register(newCollector(nil, reflect.TypeOf(stats), func() any { return stats })); err != nil {
		return err
	}
	families, err := reg.Gather()
	if err != nil {
		return err
	}
	for _, f := range families {
		if _, err := expfmt.MetricFamilyToText(w, f); err != nil {
			return err
		}
	}
	return nil
}

// Values returns the samples of one Stats struct by name, with labels as Prometheus writes them: x_missed_total{reason="a"}. Histograms
// are left out.
func Values(stats any) map[string]float64 {
	v := reflect.Indirect(reflect.ValueOf(stats))
	c, out := newCollector(nil, v.Type(), nil), make(map[string]float64)
	for i := range c.series {
		switch s, field := &c.series[i], v.FieldByIndex(c.series[i].field); {
		case s.histogram:
		case !s.labelled:
			out[s.name] = number(field)
		default:
			for of := field.MapRange(); of.Next(); {
				out[s.name+"{"+s.pairs(of.Key())+"}"] = number(of.Value())
			}
		}
	}
	return out
}

// series is the metric of one field that has a tag.
type series struct {
	name      string
	labels    []string // labels that a map's keys have as values
	field     []int    // for reflect.Value.FieldByIndex
	desc      *prometheus.Desc
	kind      prometheus.ValueType
	histogram bool
	labelled  bool
}

type collector struct {
	stats  func() any
	labels prometheus.Labels
	series []series
}

var (
	countsType   = reflect.TypeFor[histogram.Counts]()
	durationType = reflect.TypeFor[time.Duration]()
)

func newCollector(labels map[string]string, t reflect.Type, stats func() any) *collector {
	c := &collector{stats: stats, labels: labels}
	if t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	c.walk(t, nil)
	if len(c.series) == 0 {
		panic(fmt.Sprintf("BUG: metrics: %v has no tagged field", t))
	}
	return c
}

func (c *collector) walk(t reflect.Type, at []int) {
	for i := range t.NumField() {
		f := t.Field(i)
		index := append(at[:len(at):len(at)], i)
		s := series{field: index}
		name := ""
		for tag, kind := range map[string]prometheus.ValueType{"counter": prometheus.CounterValue, "gauge": prometheus.GaugeValue, "histogram": prometheus.UntypedValue} {
			if v, ok := f.Tag.Lookup(tag); ok {
				name, s.kind, s.histogram = v, kind, tag == "histogram"
			}
		}
		if name == "" {
			if f.Type.Kind() == reflect.Struct && f.Type != countsType {
				c.walk(f.Type, index)
			}
			continue
		}
		of := f.Type
		if label, ok := f.Tag.Lookup("label"); ok {
			s.labels, s.labelled = strings.Split(label, ","), true
			if key := of.Key(); key.Kind() == reflect.Array && key.Len() != len(s.labels) || key.Kind() != reflect.Array && len(s.labels) > 1 {
				panic(fmt.Sprintf("BUG: metrics: %v.%s has not one value for each of %s", t, f.Name, label))
			}
			of = of.Elem()
		}
		if s.histogram != (of == countsType) || !s.histogram && !numeric(of) {
			panic(fmt.Sprintf("BUG: metrics: %v.%s cannot be %s", t, f.Name, f.Tag))
		}
		s.name = name
		s.desc = prometheus.NewDesc(name, f.Tag.Get("help"), s.labels, c.constant(f.Tag.Get("always")))
		c.series = append(c.series, s)
	}
}

// constant returns the labels that all samples of a field have: those of the collector, and those of the field's tag `always`, which
// has the form a=b,c=d.
func (c *collector) constant(always string) prometheus.Labels {
	if always == "" {
		return c.labels
	}
	out := prometheus.Labels{}
	maps.Copy(out, c.labels)
	for pair := range strings.SplitSeq(always, ",") {
		label, value, _ := strings.Cut(pair, "=")
		out[label] = value
	}
	return out
}

func numeric(t reflect.Type) bool {
	return t.Kind() == reflect.Bool || t.ConvertibleTo(reflect.TypeFor[float64]())
}

// Describe implements prometheus.Collector.
func (c *collector) Describe(ch chan<- *prometheus.Desc) {
	for i := range c.series {
		ch <- c.series[i].desc
	}
}

// Collect implements prometheus.Collector.
func (c *collector) Collect(ch chan<- prometheus.Metric) {
	v := reflect.Indirect(reflect.ValueOf(c.stats()))
	for i := range c.series {
		s := &c.series[i]
		field := v.FieldByIndex(s.field)
		if !s.labelled {
			ch <- s.sample(field)
			continue
		}
		for of := field.MapRange(); of.Next(); {
			ch <- s.sample(of.Value(), values(of.Key())...)
		}
	}
}

// values returns the label values in a map's key.
func values(key reflect.Value) []string {
	if key.Kind() != reflect.Array {
		return []string{key.String()}
	}
	out := make([]string, key.Len())
	for i := range out {
		out[i] = key.Index(i).String()
	}
	return out
}

// pairs returns the labels and their values in Prometheus's form.
func (s *series) pairs(key reflect.Value) string {
	var out []string
	for i, v := range values(key) {
		out = append(out, fmt.Sprintf("%s=%q", s.labels[i], v))
	}
	return strings.Join(out, ",")
}

func (s *series) sample(v reflect.Value, labels ...string) prometheus.Metric {
	if !s.histogram {
		return prometheus.MustNewConstMetric(s.desc, s.kind, number(v), labels...)
	}
	counts := v.Interface().(histogram.Counts)
	buckets, sum := make(map[float64]uint64, len(counts.Bounds)), 0.0
	for i := range counts.Bounds {
		bound, n := counts.Below(i)
		buckets[bound] = n
	}
	if counts.Unit > 0 {
		sum = float64(counts.Sum) * counts.Unit
	}
	return prometheus.MustNewConstHistogram(s.desc, counts.Total(), sum, buckets, labels...)
}

func number(v reflect.Value) float64 {
	switch {
	case v.Type() == durationType:
		return time.Duration(v.Int()).Seconds()
	case v.Kind() == reflect.Bool:
		if v.Bool() {
			return 1
		}
		return 0
	}
	return v.Convert(reflect.TypeFor[float64]()).Float()
}
