import Cmlx

/// MLX's memory, in bytes.
public enum Memory {
    public struct Snapshot: Codable, Sendable, CustomStringConvertible {
        public var activeMemory: Int
        public var cacheMemory: Int
        public var peakMemory: Int

        public var description: String {
            "peak \(peakMemory), active \(activeMemory), cache \(cacheMemory)"
        }
    }

    public static var activeMemory: Int { read(mlx_get_active_memory) }
    public static var cacheMemory: Int { read(mlx_get_cache_memory) }
    public static var peakMemory: Int {
        get { read(mlx_get_peak_memory) }
        set { mlx_reset_peak_memory() }
    }

    public static var memoryLimit: Int {
        get { read(mlx_get_memory_limit) }
        set { _ = read { mlx_set_memory_limit($0, newValue) } }
    }

    /// Reading sets the limit to learn the one before, and sets that again.
    public static var cacheLimit: Int {
        get {
            let limit = read { mlx_set_cache_limit($0, cacheMemory) }
            _ = read { mlx_set_cache_limit($0, limit) }
            return limit
        }
        set { _ = read { mlx_set_cache_limit($0, newValue) } }
    }

    public static func snapshot() -> Snapshot {
        Snapshot(activeMemory: activeMemory, cacheMemory: cacheMemory, peakMemory: peakMemory)
    }

    private static func read(_ call: (UnsafeMutablePointer<Int>?) -> Int32) -> Int {
        var bytes = 0
        _ = call(&bytes)
        return bytes
    }
}

/// Older names for `Memory`, and what MLX knows of the default device.
public enum GPU {
    public struct DeviceInfo: Sendable {
        public let architecture: String
    }

    public static func deviceInfo() -> DeviceInfo {
        initError()
        var device = mlx_device_new()
        var info = mlx_device_info_new()
        defer {
            mlx_device_free(device)
            mlx_device_info_free(info)
        }
        var architecture: UnsafePointer<CChar>?
        mlx_get_default_device(&device)
        mlx_device_info_get(&info, device)
        mlx_device_info_get_string(&architecture, info, "architecture")
        return DeviceInfo(architecture: architecture.map { String(cString: $0) } ?? "Unknown")
    }

    public typealias Snapshot = Memory.Snapshot

    public static var activeMemory: Int { Memory.activeMemory }
    public static var cacheMemory: Int { Memory.cacheMemory }
    public static var peakMemory: Int { Memory.peakMemory }
    public static var memoryLimit: Int { Memory.memoryLimit }
    public static var cacheLimit: Int { Memory.cacheLimit }
    public static func snapshot() -> Snapshot { Memory.snapshot() }
    public static func set(cacheLimit: Int) { Memory.cacheLimit = cacheLimit }
    public static func set(memoryLimit: Int, relaxed: Bool = true) {
        Memory.memoryLimit = memoryLimit
    }
}
