import Cmlx

public enum DeviceType: String, Hashable, Sendable {
    case cpu
    case gpu
}

/// A processor that MLX computes on.
public final class Device: @unchecked Sendable, Equatable, CustomStringConvertible {
    let ctx: mlx_device

    public static let cpu = Device(.cpu)
    public static let gpu = Device(.gpu)

    @TaskLocal private static var current: Device?

    init(_ ctx: mlx_device) { self.ctx = ctx }

    public init(_ deviceType: DeviceType, index: Int32 = 0) {
        initError()
        ctx = mlx_device_new_type(deviceType == .gpu ? MLX_GPU : MLX_CPU, index)
    }

    deinit { mlx_device_free(ctx) }

    public var deviceType: DeviceType? {
        var type = MLX_CPU
        mlx_device_get_type(&type, ctx)
        return type == MLX_GPU ? .gpu : .cpu
    }

    // By what it is to MLX: a GPU that tests provide is the CPU in truth.
    var defaultStream: Stream { mlx_device_equal(ctx, Device.cpu.ctx) ? .cpu : .gpu }

    public static func defaultDevice() -> Device { current ?? MLX.defaultDevice }

    public static func == (lhs: Device, rhs: Device) -> Bool { lhs.deviceType == rhs.deviceType }

    public var description: String { text { mlx_device_tostring(&$0, ctx) } }
}

/// The device that MLX itself chose.
private let defaultDevice: Device = {
    var device = mlx_device_new()
    mlx_get_default_device(&device)
    return Device(device)
}()
