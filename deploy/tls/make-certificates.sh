#!/bin/sh
# A CA and a certificate for each service of compose.tls.yml, as docs/tls.md describes. What has more than 30 days left and
# what another CA issued is left alone, so it may be run again at any time. kvpool's services take up what is new as they
# run; Redis does when it is restarted.
#   make-certificates.sh DIRECTORY [--renew]        --renew: all of this CA, now
# DIRECTORY/NAME gets tls.crt, tls.key and ca.crt; DIRECTORY/ca keeps the CA's key, which no service may have.
set -eu
umask 077
directory=$1
renew=${2:-}
ca=$directory/ca
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir -p "$ca"

if [ ! -s "$ca/ca.crt" ]; then
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 3650 -subj /CN=kvpool-ca \
        -keyout "$ca/ca.key" -out "$scratch/ca.crt" 2> "$scratch/said" || { cat "$scratch/said" >&2; exit 1; }
    mv "$scratch/ca.crt" "$ca/ca.crt"
fi

# issue NAME OWNER SUBJECT_ALT_NAMES: of the user who reads the key; as another user than root all files stay ours.
issue() {
    to=$directory/$1
    mkdir -p "$to"
    if [ -s "$to/tls.crt" ]; then
        if ! openssl verify -no_check_time -CAfile "$ca/ca.crt" "$to/tls.crt" > /dev/null 2>&1; then
            echo "$1: its certificate is of another CA and stays"
            return
        fi
        if [ -z "$renew" ] && openssl x509 -noout -checkend 2592000 -in "$to/tls.crt" > /dev/null; then
            return
        fi
    fi
    openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj "/CN=$1" \
        -keyout "$to/tls.key.new" -out "$scratch/tls.csr" 2> "$scratch/said" || { cat "$scratch/said" >&2; exit 1; }
    printf 'subjectAltName=%s\nextendedKeyUsage=serverAuth,clientAuth\n' "$3" > "$scratch/tls.ext"
    openssl x509 -req -in "$scratch/tls.csr" -CA "$ca/ca.crt" -CAkey "$ca/ca.key" -set_serial "0x$(openssl rand -hex 16)" \
        -days 90 -extfile "$scratch/tls.ext" -out "$to/tls.crt.new" 2> "$scratch/said" \
        || { cat "$scratch/said" >&2; exit 1; }
    cp "$ca/ca.crt" "$to/ca.crt.new"
    chmod 0444 "$to/tls.crt.new" "$to/ca.crt.new"
    chmod 0400 "$to/tls.key.new"
    if [ "$(id -u)" -eq 0 ]; then
        chown "$2" "$to/tls.key.new"
    fi
    for file in ca.crt tls.key tls.crt; do
        mv "$to/$file.new" "$to/$file"
    done
    chmod 0755 "$to"
    echo "$1: a certificate for 90 days"
}

issue redis "${REDIS_USER:-999:1000}" DNS:redis,DNS:localhost
for index in index-0 index-1; do
    issue "$index" 10001:10001 "DNS:$index,DNS:localhost,IP:127.0.0.1"
done
for service in pagestore-0 pagestore-1 gpuagent-0 gpuagent-1; do
    issue "$service" 10001:10001 "DNS:$service"
done
issue client "${KVPOOL_CLIENT_USER:-0:0}" DNS:client
