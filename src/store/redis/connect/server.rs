//! The server behind a store's connections: one node, the primary that sentinels know, or a
//! cluster. This file also records which cluster node has which slot, and warns of a server that is
//! unsuitable for limits.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

use redis::{
    ConnectionAddr, ConnectionInfo, ErrorKind, RedisConnectionInfo, RedisError, RedisResult,
    ServerErrorKind, Value, cmd, from_redis_value,
};

#[cfg(feature = "cluster")]
use super::cluster;
use super::{
    connection::{ServerConnection, open, shared},
    given::Open,
    sentinels::{self, name},
    settings::{ConnectionSettings, are_equal, sign_in},
};
use crate::{
    clock,
    error::ConfigError,
    limit::text::is_fixed_alphabet,
    local::lock,
    logging::{Throttle, warn},
};

/// The default port.
const DEFAULT_PORT: u16 = 6379;

/// The kind of server. The store connects to the addresses of its nodes, or the application opens
/// the connections.
#[derive(Clone)]
pub(crate) enum Topology {
    Node,
    /// One server, behind connections that the application opens.
    Given(Open),
    /// Sentinels that know this primary. Its host is its name.
    Sentinels(Box<ConnectionInfo>),
    Cluster,
}

pub(crate) struct Server {
    topology: Topology,
    pub(super) nodes: Vec<ConnectionInfo>,
    pub(crate) settings: ConnectionSettings,
    unsuitable_line: Throttle,
    /// A cluster's nodes. The key is the first slot in a range, and the value is the node that has
    /// the range. A range ends where the next one begins. A slot that has moved keeps its old node
    /// here until that node answers MOVED.
    nodes_of_slots: Mutex<BTreeMap<u16, Arc<str>>>,
}

impl Server {
    pub(crate) fn new(
        mut topology: Topology,
        nodes: Vec<ConnectionInfo>,
        settings: ConnectionSettings,
    ) -> Result<Self, ConfigError> {
        let is_sentinel = matches!(topology, Topology::Sentinels(_));
        #[cfg(feature = "tls")]
        check_certificates(&topology, &nodes, &settings)?;
        if nodes.is_empty() && !matches!(topology, Topology::Given(_)) {
            return Err(ConfigError::new(
                "a cluster needs the URL of a node, and sentinels that of a sentinel",
            ));
        }
        if let Topology::Sentinels(primary) = &mut topology {
            if !is_fixed_alphabet(name(primary)) {
                return Err(ConfigError::new(
                    "the host of the primary is its name, of A-Z a-z 0-9 _ . -, as in redis://mymaster",
                ));
            }
            if let ConnectionAddr::Tcp(_, port) | ConnectionAddr::TcpTls { port, .. } =
                primary.addr()
                && *port != DEFAULT_PORT
            {
                return Err(ConfigError::new(
                    "the primary has no port in its URL: the sentinels know the port",
                ));
            }
            let redis = primary.redis_settings().clone();
            **primary = sign_in(settings.transport((**primary).clone())?, redis);
        }
        let plain = RedisConnectionInfo::default();
        let first = nodes
            .first()
            .map_or(&plain, ConnectionInfo::redis_settings)
            .clone();
        let mut prepared = Vec::with_capacity(nodes.len());
        for node in nodes {
            let redis = node.redis_settings();
            if is_sentinel && redis.db() != 0 {
                return Err(ConfigError::new(
                    "a sentinel has no databases, write the number behind the name of the primary",
                ));
            }
            if !is_sentinel && !are_equal(redis, &plain) && !are_equal(redis, &first) {
                return Err(ConfigError::new(
                    "the URLs of a cluster differ in user, password, database or protocol: write them in the first URL alone",
                ));
            }
            let mut node = settings.transport(node)?;
            // At a sentinel, the store signs in with the sentinel's own user and password.
            if !is_sentinel {
                node = sign_in(node, first.clone());
            }
            prepared.push(node);
        }
        let server = Self {
            topology,
            nodes: prepared,
            settings,
            unsuitable_line: Throttle::default(),
            nodes_of_slots: Mutex::default(),
        };
        #[cfg(feature = "cluster")]
        if server.is_cluster() {
            // The cause does not show a key: `transport` has already read the certificates.
            cluster::client(&server.nodes, &server.settings, 0).map_err(|cause| {
                ConfigError::new(format!(
                    "{server} cannot be reached with these settings: {cause}"
                ))
            })?;
        }
        Ok(server)
    }

    pub(crate) fn is_cluster(&self) -> bool {
        matches!(self.topology, Topology::Cluster)
    }

    /// True if the application opens the connections.
    pub(crate) fn is_given(&self) -> bool {
        matches!(self.topology, Topology::Given(_))
    }

    /// The cluster node that has a slot, as far as this process knows.
    pub(crate) fn node_of(&self, slot: u16) -> Option<Arc<str>> {
        let nodes = self.is_cluster().then(|| lock(&self.nodes_of_slots))?;
        let (_, node) = nodes.range(..=slot).next_back()?;
        Some(Arc::clone(node))
    }

    /// The index of the node that has a slot, in slot order from 0.
    pub(crate) fn node_number(&self, slot: u16) -> Option<usize> {
        let node = self.node_of(slot)?;
        let nodes = lock(&self.nodes_of_slots);
        nodes.values().position(|other| *other == node)
    }

    /// Records a slot's new node, if the error says that the slot has moved.
    pub(crate) fn note_moved(&self, error: &RedisError) {
        let Some((node, slot)) = error.redirect_node() else {
            return;
        };
        let known = self.node_of(slot);
        if error.kind() == ErrorKind::Server(ServerErrorKind::Moved)
            && known.as_deref() != Some(node)
        {
            let mut nodes = lock(&self.nodes_of_slots);
            if let Some(known) = known {
                nodes.entry(slot.saturating_add(1)).or_insert(known);
            }
            nodes.insert(slot, node.into());
        }
    }

    /// Learns which node has which slot, from the reply to `CLUSTER SLOTS`.
    pub(super) fn learn_nodes(&self, slots: RedisResult<Value>) {
        if let Ok(Value::Array(ranges)) = slots {
            *lock(&self.nodes_of_slots) = ranges.iter().filter_map(node_of_range).collect();
        }
    }

    /// Connects to the node or primary, and measures the server's distance.
    pub(super) async fn connect(&self, distance: &AtomicU64) -> RedisResult<ServerConnection> {
        let connection = match &self.topology {
            Topology::Given(source) => source(&self.settings).await?,
            Topology::Sentinels(primary) => {
                shared(sentinels::connect(&self.nodes, primary, &self.settings).await?)
            }
            _ => shared(open(self.nodes[0].clone(), &self.settings.signing_in).await?),
        };
        // INFO is sent first, since its reply shows two errors clearly that a batch would not. A
        // server that asks for a password replies to a whole script with a protocol error, or hangs
        // up. If all of a server's connections are in use, it hangs up after its first reply. Other
        // errors are ignored here, since the first batch will get them again.
        let sent = Instant::now();
        let info = connection().req_packed_command(&cmd("INFO")).await;
        distance.store(clock::micros(sent.elapsed()), Ordering::Relaxed);
        match info.and_then(Value::extract_error) {
            Err(error) if hangs_up(&error) => return Err(error),
            Ok(info) => self.warn_of(&from_redis_value::<String>(info).unwrap_or_default()),
            Err(_) => {}
        }
        Ok(connection)
    }

    /// Warns the operator of a cluster's unsuitable nodes. `info` is the reply to `INFO`.
    pub(super) fn warn_of_nodes(&self, info: RedisResult<Value>) {
        let info = info.and_then(|info| Ok(from_redis_value::<Vec<(String, String)>>(info)?));
        for (_, info) in info.unwrap_or_default() {
            self.warn_of(&info);
        }
    }

    /// Warns the operator of a server that may forget limits.
    fn warn_of(&self, info: &str) {
        let policy = field(info, "maxmemory_policy:");
        let evicts = !["", "noeviction"].contains(&policy) && field(info, "maxmemory:") != "0";
        if evicts && let Some(suppressed) = self.unsuitable_line.pass() {
            let server = self;
            let fix =
                "set `maxmemory-policy noeviction`: limits are forgotten when its memory is full";
            warn!(%server, fix, suppressed, "this Redis does not suit rate limits");
        }
    }
}

/// Makes sure that no certificate is ignored, whether it is from the settings or from an
/// application's client.
#[cfg(feature = "tls")]
fn check_certificates(
    topology: &Topology,
    nodes: &[ConnectionInfo],
    settings: &ConnectionSettings,
) -> Result<(), ConfigError> {
    let primary = match topology {
        Topology::Sentinels(primary) => Some(&**primary),
        _ => None,
    };
    let (mut has_tls, mut has_own) = (false, false);
    for server in nodes.iter().chain(primary) {
        if let ConnectionAddr::TcpTls { tls_params, .. } = server.addr() {
            has_tls = true;
            has_own |= tls_params.is_some();
        }
    }
    let has_certificates = settings.has_certificates();
    let problem = if has_certificates && !has_tls {
        "certificates are for TLS: begin the URL with rediss://"
    } else if has_own && has_certificates && settings.certificates.root_cert.is_none() {
        "`client_certificate` replaces the certificates of a client: set `root_certificate` as well"
    } else if has_own && !has_certificates && matches!(topology, Topology::Cluster) {
        "a cluster does not use the certificates of a client: set `root_certificate`, and `client_certificate` if the client has one"
    } else {
        return Ok(());
    };
    Err(ConfigError::new(problem))
}

fn hangs_up(error: &RedisError) -> bool {
    let is_full = error
        .detail()
        .is_some_and(|text| text.contains("max number of clients"));
    error.code() == Some("NOAUTH") || error.is_connection_dropped() || is_full
}

/// A field's value in a reply to `INFO`, or empty if it is missing.
fn field<'a>(info: &'a str, name: &str) -> &'a str {
    info.lines()
        .find_map(|line| line.strip_prefix(name))
        .unwrap_or_default()
}

/// Reads a slot range in the reply to `CLUSTER SLOTS`. Returns its first slot and its node.
fn node_of_range(range: &Value) -> Option<(u16, Arc<str>)> {
    let [Value::Int(first), _, node, ..] = range.as_sequence()? else {
        return None;
    };
    let [host, Value::Int(port), ..] = node.as_sequence()? else {
        return None;
    };
    let host = from_redis_value::<String>(host.clone()).unwrap_or_default();
    Some((u16::try_from(*first).ok()?, format!("{host}:{port}").into()))
}

impl fmt::Display for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.topology {
            Topology::Node => {}
            Topology::Given(_) => f.write_str("the application's pool or closure")?,
            Topology::Sentinels(primary) => {
                write!(f, "the primary {:?} of the sentinels ", name(primary))?;
            }
            Topology::Cluster => f.write_str("the cluster of ")?,
        }
        let nodes = self.nodes.iter().map(|node| node.addr().to_string());
        f.write_str(&nodes.collect::<Vec<_>>().join(" "))
    }
}
