import SwiftUI

@main
struct ChatApp: App {
    var body: some Scene {
        WindowGroup {
            TabView {
                ChatView().tabItem { Label("Chat", systemImage: "bubble") }
                DeviceView().tabItem { Label("Device", systemImage: "checkmark.seal") }
            }
        }
    }
}
