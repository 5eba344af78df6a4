// SPDX-License-Identifier: Apache-2.0

package aws

import (
	"bufio"
	"context"
	"encoding/json"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// Default returns the same sources, in the same order, as Amazon's own programs: the environment, a web identity, the file of a profile, a
// container's agent, the instance. sts is the URL at which web identities are exchanged; empty: that of the region.
func Default(region, sts string) []Source {
	client := &http.Client{Transport: &http.Transport{Proxy: http.ProxyFromEnvironment, DisableKeepAlives: true}}
	local := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	return []Source{Environment{}, &webIdentity{client, region, sts}, Profile{}, &container{local}, &instance{local, metadataURL()}}
}

// Static is a source with fixed credentials, from the configuration.
type Static Credentials

// Find implements Source.
func (s Static) Find(context.Context) (Credentials, error) { return Credentials(s), nil }

// Name implements Source.
func (Static) Name() string { return "the configuration" }

// Anonymous is a source whose credentials mean that requests are not signed.
type Anonymous struct{}

// Find implements Source.
func (Anonymous) Find(context.Context) (Credentials, error) { return Credentials{ID: anonymous}, nil }

// Name implements Source.
func (Anonymous) Name() string { return "nobody" }

const anonymous = "\x00anonymous"

// Anonymous reports whether requests are not signed.
func (c Credentials) Anonymous() bool { return c.ID == anonymous }

// Environment reads AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN.
type Environment struct{}

// Find implements Source.
func (Environment) Find(context.Context) (Credentials, error) {
	c := Credentials{ID: os.Getenv("AWS_ACCESS_KEY_ID"), Secret: os.Getenv("AWS_SECRET_ACCESS_KEY"), Token: os.Getenv("AWS_SESSION_TOKEN")}
	if c.ID == "" || c.Secret == "" {
		return c, ErrNone
	}
	return c, nil
}

// Name implements Source.
func (Environment) Name() string { return "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" }

// maxFile bounds the bytes that are read of a file of credentials, and of an answer with credentials. The rest is ignored.
const maxFile = 1 << 20

// rereadFile is how long credentials of a file are used before the file is read again: other
// programs may renew them there.
const rereadFile = 15 * time.Minute

// Profile reads the profile AWS_PROFILE, or default, in ~/.aws/credentials (AWS_SHARED_CREDENTIALS_FILE).
type Profile struct{}

// Find implements Source.
func (Profile) Find(context.Context) (c Credentials, _ error) {
	path, name := os.Getenv("AWS_SHARED_CREDENTIALS_FILE"), os.Getenv("AWS_PROFILE")
	asked := path != "" || name != ""
	if path == "" {
		home, err := os.UserHomeDir()
		if err != nil {
			return c, ErrNone
		}
		path = filepath.Join(home, ".aws", "credentials")
	}
	if name == "" {
		name = "default"
	}
	f, err := os.Open(path)
	if errors.Is(err, os.ErrNotExist) && !asked {
		return c, ErrNone
	}
	if err != nil {
		return c, err
	}
	defer f.Close()
	section, found := "", false
	lines := bufio.NewScanner(io.LimitReader(f, maxFile))
	for lines.Scan() {
		line := strings.TrimSpace(lines.Text())
		if inner, ok := strings.CutPrefix(line, "["); ok {
			section, _, _ = strings.Cut(inner, "]")
			section = strings.TrimSpace(section)
			found = found || section == name
			continue
		}
		key, value, _ := strings.Cut(line, "=")
		if section != name || strings.HasPrefix(line, "#") || strings.HasPrefix(line, ";") {
			continue
		}
		switch value = strings.TrimSpace(value); strings.TrimSpace(key) {
		case "aws_access_key_id":
			c.ID = value
		case "aws_secret_access_key":
			c.Secret = value
		case "aws_session_token":
			c.Token = value
		}
	}
	switch {
	case lines.Err() != nil:
		return c, lines.Err()
	case !found && !asked:
		return c, ErrNone
	case c.ID == "" || c.Secret == "":
		return c, fmt.Errorf("profile %q in %s has no aws_access_key_id or no aws_secret_access_key", name, path)
	}
	c.Expires = time.Now().Add(rereadFile)
	return c, nil
}

// Name implements Source.
func (Profile) Name() string { return "the profile in ~/.aws/credentials" }

// fetch sends a request and returns the body of the answer.
func fetch(client *http.Client, r *http.Request) ([]byte, error) {
	answer, err := client.Do(r)
	if err != nil {
		return nil, err
	}
	defer answer.Body.Close()
	body, err := io.ReadAll(io.LimitReader(answer.Body, maxFile))
	if err == nil && answer.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s %s: %s %.300q", r.Method, r.URL.Redacted(), answer.Status, body)
	}
	return body, err
}

// webIdentity exchanges a token in a file (AWS_WEB_IDENTITY_TOKEN_FILE) for the credentials of a role (AWS_ROLE_ARN), which is how
// Kubernetes' service accounts work.
type webIdentity struct {
	client      *http.Client
	region, sts string
}

// Find implements Source.
func (w *webIdentity) Find(ctx context.Context) (c Credentials, _ error) {
	path, role := os.Getenv("AWS_WEB_IDENTITY_TOKEN_FILE"), os.Getenv("AWS_ROLE_ARN")
	if path == "" || role == "" {
		return c, ErrNone
	}
	token, err := os.ReadFile(path)
	if err != nil {
		return c, err
	}
	session := os.Getenv("AWS_ROLE_SESSION_NAME")
	if session == "" {
		session = fmt.Sprintf("kvasir-%d", time.Now().Unix())
	}
	at := w.sts
	if at == "" {
		at = "https://sts." + w.region + ".amazonaws.com"
	}
	form := url.Values{"Action": {"AssumeRoleWithWebIdentity"}, "Version": {"2011-06-15"}, "RoleArn": {role}, "RoleSessionName": {session}, "WebIdentityToken": {strings.TrimSpace(string(token))}}
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, at+"/", strings.NewReader(form.Encode()))
	if err != nil {
		return c, err
	}
	r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	body, err := fetch(w.client, r)
	if err != nil {
		return c, err
	}
	var answer struct {
		Result struct {
			Credentials struct {
				AccessKeyID     string `xml:"AccessKeyId"`
				SecretAccessKey string
				SessionToken    string
				Expiration      time.Time
			}
		} `xml:"AssumeRoleWithWebIdentityResult"`
	}
	if err := xml.Unmarshal(body, &answer); err != nil {
		return c, fmt.Errorf("%s: %w", at, err)
	}
	a := answer.Result.Credentials
	return checked(Credentials{a.AccessKeyID, a.SecretAccessKey, a.SessionToken, a.Expiration})
}

// Name implements Source.
func (*webIdentity) Name() string { return "AWS_WEB_IDENTITY_TOKEN_FILE and AWS_ROLE_ARN" }

var errNoKeys = errors.New("the answer lacks an access key or its secret")

func checked(c Credentials) (Credentials, error) {
	if c.ID == "" || c.Secret == "" {
		return c, errNoKeys
	}
	return c, nil
}

// document is the answer of a container's agent or an instance.
type document struct {
	AccessKeyID     string `json:"AccessKeyId"`
	SecretAccessKey string
	Token           string
	Expiration      time.Time
}

func parseDocument(body []byte) (Credentials, error) {
	var d document
	if err := json.Unmarshal(body, &d); err != nil {
		return Credentials{}, err
	}
	return checked(Credentials{d.AccessKeyID, d.SecretAccessKey, d.Token, d.Expiration})
}

// container asks the agent beside a container: AWS_CONTAINER_CREDENTIALS_RELATIVE_URI or
// _FULL_URI.
type container struct{ client *http.Client }

// Find implements Source.
func (s *container) Find(ctx context.Context) (c Credentials, _ error) {
	at := os.Getenv("AWS_CONTAINER_CREDENTIALS_FULL_URI")
	if path := os.Getenv("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"); path != "" {
		at = "http://169.254.170.2" + path
	}
	if at == "" {
		return c, ErrNone
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, at, http.NoBody)
	if err != nil {
		return c, err
	}
	token := os.Getenv("AWS_CONTAINER_AUTHORIZATION_TOKEN")
	if path := os.Getenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"); path != "" {
		text, err := os.ReadFile(path)
		if err != nil {
			return c, err
		}
		token = strings.TrimSpace(string(text))
	}
	if token != "" {
		r.Header.Set("Authorization", token)
	}
	body, err := fetch(s.client, r)
	if err != nil {
		return c, err
	}
	return parseDocument(body)
}

// Name implements Source.
func (*container) Name() string { return "the container's agent" }

// instance asks the metadata service of a virtual machine, version 2.
type instance struct {
	client *http.Client
	at     string // empty: the service must not be asked
}

// metadataURL is the URL of the metadata service, empty if it must not be asked.
func metadataURL() string {
	if strings.EqualFold(os.Getenv("AWS_EC2_METADATA_DISABLED"), "true") {
		return ""
	}
	if at := os.Getenv("AWS_EC2_METADATA_SERVICE_ENDPOINT"); at != "" {
		return strings.TrimSuffix(at, "/")
	}
	return "http://169.254.169.254"
}

// reachTime is how long the metadata service may take to answer first: without such a
// service no answer comes.
const reachTime = 2 * time.Second

// Find implements Source.
func (s *instance) Find(ctx context.Context) (c Credentials, _ error) {
	if s.at == "" {
		return c, ErrNone
	}
	first, cancel := context.WithTimeout(ctx, reachTime)
	defer cancel()
	r, err := http.NewRequestWithContext(first, http.MethodPut, s.at+"/latest/api/token", http.NoBody)
	if err != nil {
		return c, err
	}
	r.Header.Set("X-Aws-Ec2-Metadata-Token-Ttl-Seconds", "21600")
	token, err := fetch(s.client, r)
	if err != nil {
		return c, fmt.Errorf("%w: %w", ErrNone, err)
	}
	get := func(path string) ([]byte, error) {
		r, err := http.NewRequestWithContext(ctx, http.MethodGet, s.at+"/latest/meta-data/iam/security-credentials/"+path, http.NoBody)
		if err != nil {
			return nil, err
		}
		r.Header.Set("X-Aws-Ec2-Metadata-Token", string(token))
		return fetch(s.client, r)
	}
	roles, err := get("")
	if err != nil {
		return c, fmt.Errorf("%w: %w", ErrNone, err) // a machine without a role
	}
	role, _, _ := strings.Cut(strings.TrimSpace(string(roles)), "\n")
	body, err := get(role)
	if err != nil {
		return c, err
	}
	return parseDocument(body)
}

// Name implements Source.
func (*instance) Name() string { return "the instance's metadata" }
