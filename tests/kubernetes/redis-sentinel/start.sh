#!/bin/sh
# start.sh server|sentinel: Redis members know each other by the names of their pods.
set -eu
domain=redis.kvpool.svc
me=$HOSTNAME.$domain
password=$(cat /password/password)
tls="--tls-cert-file /tls/tls.crt --tls-key-file /tls/tls.key --tls-ca-cert-file /tls/ca.crt"
client="--tls --cert /tls/tls.crt --key /tls/tls.key --cacert /tls/ca.crt"

named() { # the master by whichever Sentinel answers first; nothing if none does
    for number in 0 1 2; do
        found=$(REDISCLI_AUTH=$password timeout 3 redis-cli $client -h "redis-sentinel-$number.redis-sentinel.kvpool.svc" \
            -p 26379 sentinel get-master-addr-by-name kvpool 2> /dev/null | head -1)
        case $found in redis-*) echo "$found"; return;; esac
    done
}

master() {
    found=$(named)
    echo "${found:-redis-0.$domain}" # no Sentinel runs yet
}

case $1 in
server)
    of=
    known=$(master)
    # A master that comes back, empty, before anybody missed it would take the replicas' copies with it: let them notice.
    if [ -n "$(named)" ]; then
        for _ in $(seq 60); do
            [ "$known" = "$me" ] || break
            sleep 1
            known=$(master)
        done
    fi
    [ "$known" = "$me" ] || of="--replicaof $known 6379"
    exec redis-server --port 0 --tls-port 6379 $tls --tls-replication yes --dir /data --save "" --appendonly yes \
        --maxmemory 256mb --maxmemory-policy noeviction --repl-diskless-sync-delay 0 --requirepass "$password" \
        --masterauth "$password" --replica-announce-ip "$me" $of
    ;;
sentinel)
    cat > /data/sentinel.conf << CONF
port 0
tls-port 26379
tls-replication yes
tls-cert-file /tls/tls.crt
tls-key-file /tls/tls.key
tls-ca-cert-file /tls/ca.crt
requirepass $password
sentinel sentinel-pass $password
sentinel resolve-hostnames yes
sentinel announce-hostnames yes
sentinel announce-ip $HOSTNAME.redis-sentinel.kvpool.svc
sentinel monitor kvpool $(master) 6379 2
sentinel auth-pass kvpool $password
sentinel down-after-milliseconds kvpool 3000
sentinel failover-timeout kvpool 10000
CONF
    exec redis-server /data/sentinel.conf --sentinel
    ;;
esac
