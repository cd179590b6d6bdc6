import Cmlx

/// Where an operation runs.
public struct StreamOrDevice: Sendable, CustomStringConvertible, Equatable {
    public let stream: Stream

    public static var `default`: StreamOrDevice {
        StreamOrDevice(stream: Stream.current ?? Device.defaultDevice().defaultStream)
    }

    public static func device(_ device: Device) -> StreamOrDevice {
        StreamOrDevice(stream: device.defaultStream)
    }

    public static func stream(_ stream: Stream) -> StreamOrDevice { StreamOrDevice(stream: stream) }

    public static let cpu = device(.cpu)
    public static var gpu: StreamOrDevice { device(.gpu) }

    public var ctx: mlx_stream { stream.ctx }
    public var description: String { stream.description }
}

public final class Stream: @unchecked Sendable, Equatable, CustomStringConvertible {
    let ctx: mlx_stream

    public static let cpu = Stream(mlx_default_cpu_stream_new())
    public static let gpu = Stream(mlx_default_gpu_stream_new())

    @TaskLocal static var current: Stream?

    init(_ ctx: mlx_stream) {
        initError()
        self.ctx = ctx
    }

    public convenience init() { self.init(Device.defaultDevice()) }

    public init(_ device: Device) { ctx = mlx_stream_new_device(device.ctx) }

    deinit { mlx_stream_free(ctx) }

    public static func defaultStream(_ device: Device) -> Stream { device.defaultStream }

    public static func == (lhs: Stream, rhs: Stream) -> Bool { mlx_stream_equal(lhs.ctx, rhs.ctx) }

    public var description: String { text { mlx_stream_tostring(&$0, ctx) } }
}
