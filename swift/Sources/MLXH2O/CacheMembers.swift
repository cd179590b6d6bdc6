import MLXLMCommon

/// A model's caches, members of a `CacheList` (a layer's state-space and attention caches, say) in
/// its place, each with where it is: "3", or "3.1" within a `CacheList`.
func placedMembers(of caches: [any KVCache]) -> [(place: String, cache: any KVCache)] {
    caches.enumerated().flatMap { i, cache in
        guard let list = cache as? CacheList else { return [(place: "\(i)", cache: cache)] }
        // A list tells its members by having each one replaced, by itself here.
        var members: [(place: String, cache: any KVCache)] = []
        list.mapChildren { member in
            members.append((place: "\(i).\(members.count)", cache: member))
            return member
        }
        return members
    }
}

/// The same caches with other members, in the order of ``placedMembers(of:)``. A `CacheList` is
/// changed itself, so that its class stays what the model expects.
func replacingMembers(of caches: [any KVCache], with members: [any KVCache]) -> [any KVCache] {
    var members = members.makeIterator()
    return caches.map { cache in
        guard let list = cache as? CacheList else { return members.next()! }
        list.mapChildren { _ in members.next()! }
        return list
    }
}
