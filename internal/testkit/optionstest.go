// SPDX-License-Identifier: Apache-2.0

package testkit

import (
	"math"
	"reflect"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/options"
)

// CheckNumbers fails the test unless the zero T is valid, and Validate names every field that has a negative number (NaN for a float),
// whatever the other fields are.
func CheckNumbers[T interface{ Validate() error }](t *testing.T) {
	t.Helper()
	var zero, all T
	if err := zero.Validate(); err != nil {
		t.Errorf("zero: %v", err)
	}
	numbers := 0
	for i := range reflect.TypeFor[T]().NumField() {
		field := reflect.TypeFor[T]().Field(i)
		if !field.IsExported() {
			continue
		}
		var one T
		for _, o := range []*T{&one, &all} {
			switch v := reflect.ValueOf(o).Elem().Field(i); v.Kind() {
			case reflect.Int, reflect.Int64:
				v.SetInt(-1)
			case reflect.Float64:
				v.SetFloat(math.NaN())
			default:
				continue
			}
			numbers++
		}
		if reflect.ValueOf(one).IsZero() {
			continue
		}
		named := 0
		options.Each(one.Validate(), func(e *options.Error) {
			if named++; e.Field != field.Name {
				t.Errorf("%s: %v", field.Name, e)
			}
		})
		if named != 1 {
			t.Errorf("%s: %v", field.Name, one.Validate())
		}
	}
	named := 0
	options.Each(all.Validate(), func(*options.Error) { named++ })
	if numbers == 0 || named != numbers/2 {
		t.Errorf("%d of %d fields are named at once", named, numbers/2)
	}
}
