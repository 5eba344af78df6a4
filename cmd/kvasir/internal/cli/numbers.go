// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"reflect"
	"strconv"

	"github.com/alecthomas/kong"

	"github.com/kvasir-kv/kvasir/internal/options"
)

// numbers makes kong parse every number of a flag, of the environment and of a file as a decimal number. Without it, Go and kong read
// 010 as 8.
var numbers = []kong.Option{
	kong.KindMapper(reflect.Int, kong.MapperFunc(decimalInt)),
	kong.KindMapper(reflect.Int64, kong.MapperFunc(decimalInt)),
	kong.KindMapper(reflect.Float64, kong.MapperFunc(decimalFloat)),
}

func decimalInt(ctx *kong.DecodeContext, target reflect.Value) error {
	text, err := numberText(ctx, "int")
	if err != nil {
		return err
	}
	n, err := strconv.ParseInt(text, 10, target.Type().Bits())
	if err != nil {
		return fmt.Errorf("expected a valid %d bit int but got %q", target.Type().Bits(), text)
	}
	target.SetInt(n)
	return nil
}

func decimalFloat(ctx *kong.DecodeContext, target reflect.Value) error {
	text, err := numberText(ctx, "float")
	if err != nil {
		return err
	}
	n, err := strconv.ParseFloat(text, 64)
	if err != nil {
		return fmt.Errorf("expected a float but got %q (string)", text)
	}
	target.SetFloat(n)
	return nil
}

// numberText returns the text of a number. It returns an error for a number with a leading zero, which may be meant as octal or as
// decimal.
func numberText(ctx *kong.DecodeContext, kind string) (string, error) {
	t, err := ctx.Scan.PopValue(kind)
	if err != nil {
		return "", err
	}
	text, ok := t.Value.(string)
	if f, is := t.Value.(float64); is {
		text = strconv.FormatFloat(f, 'f', -1, 64)
	} else if !ok {
		text = fmt.Sprint(t.Value)
	}
	return text, options.LeadingZero(text)
}
